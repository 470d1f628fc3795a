"""The data of a sweep's jobs, looked at once before any of them starts: what cannot train is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace

from ppctl.config import Config
from ppctl.errors import ConfigError, DataError
from ppctl.launch.sweep.finished import has_ended
from ppctl.launch.sweep.jobs import Job, Sweep

OF_RUN = ("seed", "eval_every", "eval_batches")  # what data and evaluations depend on


def with_data_checked(sweep: Sweep) -> Sweep:
    """Return a sweep whose jobs with too little data are refused.

    Left as it is where its jobs train nothing, or run on other machines. ConfigError where a search could choose no
    other job.
    """
    is_here = sweep.submit is None or sweep.submit.is_here
    if not sweep.trains or not is_here:
        return sweep
    jobs = sweep.jobs if sweep.study is None else sweep.study.samples()
    asked = {
        index: _request(job.config)
        for index, job in enumerate(jobs)
        if job.config is not None and not has_ended(job.run_dir, job.config)
    }
    found = _refusals([*dict.fromkeys(asked.values())])
    checked = [_with_refusal(job, found.get(asked.get(index, ""))) for index, job in enumerate(jobs)]
    if sweep.study is None:
        return replace(sweep, jobs=checked)
    reasons = [job.refusal for job in checked if job.refusal is not None]
    if len(reasons) == len(checked):
        raise ConfigError(reasons[0])
    return sweep


def _request(config: Config) -> str:
    run = asdict(config.run)
    parts = {"model": asdict(config.model), "data": asdict(config.data), "run": {name: run[name] for name in OF_RUN}}
    return json.dumps(parts)


def _with_refusal(job: Job, reason: str | None) -> Job:
    return job if reason is None else replace(job, config=None, refusal=reason, refusal_kind=DataError.kind)


def _refusals(requests: list[str]) -> dict[str, str | None]:
    """Return for each request why it has too little data, or None."""
    if not requests:
        return {}
    command = [sys.executable, "-m", "ppctl.training.data_check"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}  # an accelerator is for the jobs
    texts = f"[{','.join(requests)}]"
    done = subprocess.run(command, input=texts, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(f"ppctl: the data of the jobs could not be looked at beforehand: {lines[-1]}", file=sys.stderr)
        return {}
    return dict(zip(requests, json.loads(done.stdout), strict=True))
