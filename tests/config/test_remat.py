"""What may be said of remat and patterns, and how the rest is refused, before jax is imported."""

import subprocess
import sys

import pytest

from nnxtrain.config.remat import ACTIONS
from nnxtrain.tags import TAGS
from tests.support import ROOT, TINY


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("remat.policy=ful", ["'ful' is not one of none, full, dots,", "did you mean full?"]),
        ("remat.policy=custom", ["remat.policy: custom needs remat.tags", "remat.tags=mlp_hidden=save"]),
        (
            "remat.tags=mlp_up=save",
            ["remat.tags: [mlp_up=save] has no effect", "remat.policy=custom", "remat.policy is none"],
        ),
        ("remat.policy=custom remat.tags=mlp_upp=save", [f"'mlp_upp' is not one of {', '.join(TAGS)}", "mlp_up?"]),
        (
            "remat.policy=custom remat.tags=keys=sav",
            [f"'sav' is not one of {', '.join(ACTIONS)}", "did you mean save?"],
        ),
        ("remat.policy=custom remat.tags=keys", ["'keys' has no action; write keys=save, keys=offload or"]),
        ("remat.policy=custom remat.tags=keys=save,keys=offload", ["keys occurs twice"]),
        (
            "remat.policy=custom remat.tags=layer_input=recompute",
            ["there is nothing to recompute it"],
        ),
        ("model.pattern=local,globl model.window=4", ["model.pattern: 'globl' is not one of global, local", "global?"]),
        ("model.pattern=[]", ["model.pattern: must contain at least one of global, local"]),
        ("model.pattern=local,global", ["model.window: is missing", "[local, global]"]),
        (
            "model.window=8",
            ["window: 8 has no effect", "model.pattern contains local", "model.pattern is [global]"],
        ),
        ("model.pattern=local model.window=0", ["model.window: 0 must be at least 1"]),
        ("model.scan_unroll=0", ["model.scan_unroll: 0 must be at least 1"]),
    ],
)
def test_what_cannot_be_is_refused_by_key_and_value(refused, words, parts):
    """A typo that is ignored costs a run; the message says what would be right."""
    message = refused("", *words.split())
    for part in parts:
        assert part in message


def test_tags_are_read_from_files_and_words(loaded):
    """A list in YAML, or commas on the command line."""
    want = {"mlp_gate": "save", "queries": "offload", "values": "recompute"}
    text = "remat:\n  policy: custom\n  tags: [mlp_gate=save, queries=offload, values=recompute]\n"
    assert loaded(text).remat.actions == want
    words = ("remat.policy=custom", "remat.tags=mlp_gate=save,queries=offload,values=recompute")
    assert loaded("", *words).remat.actions == want


def test_kinds_of_layers_repeat_and_a_long_pattern_is_cut(loaded):
    """The stack, the FLOPs and the checkpoint all count by these."""
    words = ("model.pattern=local,local,global", "model.window=8")
    config = loaded("", *words, "model.layers=8").model
    assert config.kinds == ("local", "local", "global", "local", "local", "global", "local", "local")
    config = loaded("", *words, "model.layers=2").model
    assert (config.period, config.kinds) == (2, ("local", "local"))


def test_refusals_come_without_jax():
    """Importing it takes seconds."""
    code = (
        "import sys; from nnxtrain.config.load import load; from nnxtrain.errors import ConfigError\n"
        "try: load(sys.argv[1], ['remat.policy=custom', 'remat.tags=x=save'])\n"
        "except ConfigError: print('jax' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(TINY)], capture_output=True, text=True, cwd=ROOT, check=True)
    assert ran.stdout == "False\n"
