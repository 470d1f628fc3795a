"""The un-pipelined run that the others are compared with."""

import pytest
from support.promise import REFERENCE, train


@pytest.fixture(scope="session")
def reference_losses(tmp_path_factory):
    """The losses of all steps without a pipeline."""
    losses = train(tmp_path_factory.mktemp("reference") / "run", REFERENCE)
    assert losses[-1] < 0.9 * losses[0]  # it learns: a wrong gradient would show
    return losses
