"""A run's adapters as a directory that PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.training.exchange.export_model import DTYPES, Exported, check_dtype, opened, tensor_of
from ppctl.training.exchange.families import model_config
from ppctl.training.exchange.names import adapter_parameters, target_modules

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None) -> Exported:
    """Write the adapters of a checkpoint of optim.train=lora by PEFT's names.

    step: None: the newest. dtype: of the tensors; None: float32.

    Raises:
        ConfigError: The run has no adapters, its model is none that `transformers` has, or `out` is there already.
        CheckpointError: There is no such checkpoint.
    """
    from safetensors.numpy import save_file  # here: what exports nothing needs no time for it

    run, model = opened(run_dir, out)
    chosen = dtype or "float32"
    check_dtype(chosen)
    found = run.adapters(step)
    if found is None:
        raise ConfigError(f"--adapter: {run_dir} was not trained with optim.train=lora and has no adapters.")
    lora, params = found
    model_config(model, params["ends"]["embedding"].shape[0])  # refuses
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": target_modules(params),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        tensors = {each.name: tensor_of(params, each, DTYPES[chosen]) for each in adapter_parameters(params)}
        save_file(tensors, out / TENSORS, {"format": "pt"})
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Name another directory with --out.") from error
    return Exported((TENSORS, CONFIG), chosen, run.steps[-1] if step is None else step)
