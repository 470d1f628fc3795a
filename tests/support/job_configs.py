"""Small requests of a training job."""

from ppctl.config import MLP, Config, Mesh, Regression, Run, Schedule, Synthetic, Transformer

BATCH_SIZE, SEQ_LEN, VOCAB_SIZE = 8, 12, 24


def small(**settings):
    return Transformer(
        **({"num_layers": 4, "d_model": 16, "num_heads": 4, "seq_len": SEQ_LEN} | settings)
    )


def transformer_config(**parts):
    data = Synthetic(batch_size=BATCH_SIZE, vocab_size=VOCAB_SIZE, num_sequences=512)
    defaults = {
        "model": small(),
        "data": data,
        "mesh": Mesh(1, 2),
        "schedule": Schedule(num_microbatches=2),
    }
    return Config(**(defaults | {"run": Run(dtype="float32")} | parts))


def mlp_config(**parts):
    data = Regression(batch_size=BATCH_SIZE, num_features=5, num_targets=3, num_rows=512)
    return transformer_config(**({"model": MLP(num_layers=4, d_model=16), "data": data} | parts))
