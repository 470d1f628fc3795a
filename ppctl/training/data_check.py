"""Whether the data of requests are enough, before a sweep starts any of them: python -m ppctl.training.data_check.

A process of its own, because the sweep's imports neither JAX nor code of the user's. Requests come as JSON on stdin,
and leave as JSON on stdout, for each why it cannot train, or null.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ppctl.config.stored import model_and_data
from ppctl.errors import PpctlError
from ppctl.training.checks import check_evaluations
from ppctl.training.job import open_data


def refusal(settings: Mapping[str, Any]) -> str | None:
    """Return why these settings (model, data, run) have too little data, or None. Only sizes are looked at."""
    config = model_and_data(settings)
    try:
        check_evaluations(config.run, open_data(config, sizes_only=True))
    except PpctlError as error:
        return " ".join(str(error).split())
    return None


def main() -> None:
    """Answer the requests on stdin."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the user's own code prints is no answer
    json.dump([refusal(settings) for settings in json.load(sys.stdin)], answers)
    answers.close()


if __name__ == "__main__":
    main()
