"""A run's adapters as a directory that PEFT loads."""

from __future__ import annotations

import json
from pathlib import Path

from ppctl.errors import ConfigError
from ppctl.language.export_model import DTYPES, Exported, check_dtype, opened, tensor_of
from ppctl.language.model_files import check_new, writing_to
from ppctl.language.tensor_names import adapter_parameters, target_modules
from ppctl.language.transformers_config import model_config

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(
    run_dir: Path, out: Path, *, step: int | None = None, dtype: str | None = None
) -> Exported:
    """Write the adapters of a checkpoint of optim.train=lora by PEFT's names.

    step: None: the newest. dtype: of the tensors; None: float32.

    Raises:
        ConfigError: The run has no adapters, `transformers` lacks its model, or `out` exists.
        CheckpointError: There is no such checkpoint.
    """
    from safetensors.numpy import save_file  # imported when needed

    # 1. the adapters
    check_new(out)
    run, model = opened(run_dir)
    dtype = dtype or "float32"
    check_dtype(dtype)
    adapters = run.adapters(step)
    if adapters is None:
        raise ConfigError(
            f"--adapter: {run_dir} was not trained with optim.train=lora and has no adapters."
        )
    lora, params = adapters
    model_config(model, params["embed_head"]["embedding"].shape[0])  # raises for other models
    # 2. the files
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None}
    config |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": target_modules(params)}
    config |= {"lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False}
    config |= {"inference_mode": True}
    with writing_to(out):
        out.mkdir(parents=True, exist_ok=True)
        names = adapter_parameters(params)
        tensors = {each.name: tensor_of(params, each, DTYPES[dtype]) for each in names}
        save_file(tensors, out / TENSORS, {"format": "pt"})
        (out / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return Exported((TENSORS, CONFIG), dtype, run.steps[-1] if step is None else step)
