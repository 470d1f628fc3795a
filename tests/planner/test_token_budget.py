"""The cost of training on plan.tokens tokens: by hand, in text, JSON and page; invalid numbers are
refused.
"""

import json
import math
from dataclasses import replace

import pytest
from support.plans import planned

from ppctl import cli, config
from ppctl.errors import ConfigError
from ppctl.planner.cost.token_budget import token_budget
from ppctl.planner.show.plan_page import plan_page
from ppctl.training.pipeline.known_hardware import known

H100, V5E, HOST = (known()[name] for name in ("h100", "v5e", "host"))
WORDS = (
    "mesh=1x2 schedule=1f1b schedule.num_microbatches=2 model.num_layers=2 model.d_model=32 "
    "model.num_heads=2 model.seq_len=16 data=synthetic data.vocab_size=64 data.batch_size=4 "
    "run.dtype=bfloat16 run.platform=cpu"
)


def budget(tokens, hardware, step_s=1.8, num_devices=64):
    """Of steps of a million tokens."""
    found = token_budget(tokens, 1_000_000, step_s, num_devices, hardware)
    assert found is not None
    return found


def test_by_hand():
    found = budget(1e12, H100)  # a million steps, 500 hours
    assert (found.num_steps, found.days, found.device_hours) == (1_000_000, 500 / 24, 32_000)
    assert found.energy_kwh == pytest.approx(0.7 * 32_000)
    assert found.text == (
        "1e12 in 20.8 days: 1,000,000 steps, 32,000 GPU-hours, 22.4 MWh at 700 W a GPU, without "
        "hosts and cooling (evaluations, checkpoints and restarts not counted)"
    )


@pytest.mark.parametrize(
    ("tokens", "hardware", "text"),
    [
        (
            1e12,
            V5E,
            "1e12 in 20.8 days: 1,000,000 steps, 32,000 chip-hours (eval",
        ),  # nobody states its power
        (2.5e9, H100, "2.5e9 in 1.25 hours: 2,500 steps, 80 GPU-hours, 56 kWh at 700 W"),
        (1e12, HOST, "1e12 in 20.8 days: 1,000,000 steps, 32,000 device-hours (eval"),
        (1e12, None, "1e12 in 20.8 days: 1,000,000 steps, 32,000 device-hours (eval"),
        (1.0, H100, "1 in 0.0005 hours: 1 steps, "),
    ],
)
def test_energy_is_stated_if_the_power_is_known(tokens, hardware, text):
    found = budget(tokens, hardware)
    assert found.text.startswith(text)
    assert (found.energy_kwh is None) == (hardware is None or hardware.power_w is None)


def test_the_last_step_counts_whole():
    assert budget(1_000_001, None).num_steps == 2


@pytest.mark.parametrize("missing", [{"tokens": None}, {"step_tokens": None}, {"step_s": None}])
def test_a_budget_with_an_unknown_number_is_not_stated(missing):
    given = {"tokens": 1e9, "step_tokens": 10, "step_s": 1.0, "num_devices": 1, "hardware": None}
    assert token_budget(**(given | missing)) is None


@pytest.mark.parametrize("tokens", [0.0, 0.5, -1e9, 1e19, math.inf, math.nan])
def test_an_invalid_number_of_tokens_is_refused(tokens):
    request = config.Plan(tokens=tokens)
    with pytest.raises(ConfigError, match=r"^plan.tokens=.* must lie in"):
        config.check(replace(config.Config(), plan=request))


def test_plan_prints_the_token_budget_in_text_and_json(capsys):
    assert cli.main(["plan", *WORDS.split(), "hardware=h100", "plan.tokens=1e12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = found["token_budget"]
    assert told["days"] * 86400 == pytest.approx(math.ceil(1e12 / (4 * 16)) * found["step_time_s"])
    assert told["power_w"] == 700
    assert cli.main(["plan", *WORDS.split(), "hardware=h100", "plan.tokens=1e12"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("tokens "))
    assert line.startswith(f"tokens    1e12 in {told['days']:,.1f} days: 15,625,000,000 steps, ")


def test_the_page_has_a_card_of_it():
    request = config.Config(
        model=config.Transformer(num_layers=2, d_model=32, num_heads=2, seq_len=16),
        mesh=config.Mesh(1, 2, 1),
        schedule=config.Schedule("1f1b", 2),
        data=config.Synthetic(batch_size=4, vocab_size=64),
        hardware=H100,
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(tokens=1e12),
    )
    found = planned(request)
    assert found.token_budget is not None
    page = plan_page(found, "no chart", [])
    assert found.token_budget.text in page
    assert "MWh at 700 W a GPU" in page


def test_data_that_are_no_text_have_no_tokens(capsys):
    assert (
        cli.main(["plan", "model=mlp", "data=regression", "plan.tokens=5e9", "run.platform=cpu"])
        == 2
    )
    assert capsys.readouterr().err == (
        "ppctl: plan.tokens=5e+09 counts tokens of text, but the data are not text. Leave it out.\n"
    )
