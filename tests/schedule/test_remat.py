"""The setting executor.remat: its members are the strings that records show, and other names are
refused.
"""

import json

import pytest

from ppctl import config
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat


def test_records_show_the_setting_as_it_is_written():
    assert json.dumps({Remat.LAYER: [*Remat]}) == '{"layer": ["none", "layer", "full"]}'
    assert f"{Remat.of('full')}" == "full"


def test_another_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError) as error:
        Remat.of("some")
    assert str(error.value) == "remat=some is not a setting. Use one of none, layer, full."


def test_the_settings_of_a_run_are_these():
    assert tuple(Remat) == config.Reference.REMAT == config.Tune.REMAT
