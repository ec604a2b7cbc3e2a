"""People who know MaxText type its names; the refusal names ours."""

import pytest

from nnxtrain.config.checks import LEAVES
from nnxtrain.config.maxtext import MAXTEXT_KEYS

PROMISED = {
    "remat_policy=full": "remat.policy",
    "scan_layers=True": "model.scan_layers",
    "dataset_type=synthetic": "data.source",
    "model_name=llama2-7b": "model.preset",
    "enable_checkpointing=false": "checkpoint.enabled",
    "async_checkpointing=False": "checkpoint.background",
    "per_device_batch_size=4": "batch.global_size",
    "learning_rate=1": "optimizer.learning_rate",
}


def test_a_name_of_maxtext_is_answered_with_a_key_that_exists(refused):
    """A renamed key would leave the table behind."""
    _, *lines = refused("", *(f"{name}=1" for name in MAXTEXT_KEYS)).splitlines()
    for (name, ours), line in zip(MAXTEXT_KEYS.items(), lines, strict=True):
        assert name not in LEAVES
        assert ours.split(" ")[0] in LEAVES
        assert line == f"  command line '{name}=1': unknown key {name} (MaxText's name); here it is {ours}"
    assert refused(f"seed: 1\n{name}: 1\n").startswith(f"run.yml:2: unknown key {name} (MaxText's name)")


@pytest.mark.parametrize(("word", "ours"), PROMISED.items())
def test_the_promised_names_are_answered(refused, word, ours):
    """DESIGN names them one by one."""
    message = refused("", word)
    assert f"'{word}'" in message
    assert ours in message


def test_all_names_of_a_maxtext_command_are_answered_at_once(refused):
    """One refusal a name would take eight starts."""
    message = refused("", *PROMISED)
    assert message.startswith(f"{len(PROMISED)} problems")
    assert all(ours in message for ours in PROMISED.values())
