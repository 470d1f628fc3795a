"""A request to tune, and layouts that a search may have found."""

from ppctl import config
from ppctl.cli.compose import compose
from ppctl.planner.cost.predict_step import PipelinePlan
from ppctl.planner.cost.step_time import StepTime
from ppctl.planner.search.layout_candidate import Candidate
from ppctl.planner.search.tune_layouts import Row
from ppctl.schedule.mesh_axes import MeshSizes

WORDS = (
    "model=mlp model.num_layers=5 model.d_model=32 data=regression data.batch_size=32 "
    "data.num_rows=512 data.num_features=8 data.num_targets=512 data.eval_fraction=0.1 "
    "run.eval_batches=1 run.dtype=float32 run.platform=cpu"
)


def composed(words, config_dir=None):
    found = compose(words, config_dir)
    assert isinstance(found, config.Config)
    return found


def request(*words):
    return composed([*WORDS.split(), *words])


def layout(mesh, seconds, measured_s=None):
    """A row of `ppctl tune`."""
    time, sizes = StepTime(seconds, 0.0, seconds, 1.0), (5,) * mesh[1]
    found = Candidate(MeshSizes(*mesh), "1f1b", 1, 4, "none", sizes, time, 1, None)
    return Row(
        found,
        PipelinePlan("host", "float32", ({"parameters": 1},), None, None, time=time),
        {},
        measured_s,
    )
