"""A key that somebody gives and nothing reads is refused, or said; every key, by its own declaration."""

import pytest

from nnxtrain.config.checks import LEAVES, value_at
from nnxtrain.config.load import load
from nnxtrain.config.reads import show
from nnxtrain.config.record import as_mapping, to_yaml
from nnxtrain.errors import ConfigError
from tests.config.values import failing, holding, other_than_default, with_companions
from tests.support import ROOT

CONDITIONS = {path: rule for path, leaf in LEAVES.items() if (rule := leaf.declared.metadata["read"]) is not None}
CONDITIONAL = [path for path, rule in CONDITIONS.items() if any(rule.ways) and other_than_default(path) is not None]
UNREAD = {  # where other words than those made from the condition are needed
    "eval.max_batches": ("data.source=stdlib", "data.validation_fraction=0"),
    "profile.first_wait": ("profile.enabled=true",),
    "distributed.processes": ("distributed.detect=true",),
    "distributed.process": ("distributed.detect=true",),
}
QUICKSTART = ROOT / "configs" / "quickstart.yml"


def unread_words(path: str) -> list[str]:
    """Returns words under which `path` has no effect, and that give it a value other than its default."""
    word = f"{path}={other_than_default(path)}"
    return [*UNREAD[path], word] if path in UNREAD else with_companions(*failing(CONDITIONS[path]), word)


def test_every_key_is_read_under_each_condition_that_it_states(loaded, write):
    """A condition that is too narrow refuses what works; what is accepted must survive printing (every key does)."""
    for path in LEAVES:
        text = other_than_default(path)
        if text is None:
            continue
        for way in CONDITIONS[path].ways if path in CONDITIONS else ((),):
            config = loaded("", *with_companions(*map(holding, way), f"{path}={text}"))
            assert value_at(config, path) != LEAVES[path].default
            assert load(write(to_yaml(config), "again.yml")) == config


def test_a_key_that_nothing_reads_is_refused_or_said_with_value_and_condition(write):
    """Momentum beside adamw, a decay of a curve that has none: silence costs a run that is not what was asked for."""
    for path in CONDITIONAL:
        *others, last = unread_words(path)
        said = []
        if CONDITIONS[path].is_only_noted:
            config = load(write(""), [*others, last], say=said.append)
            assert value_at(config, path) == LEAVES[path].default
        else:
            with pytest.raises(ConfigError) as caught:
                load(write(""), [*others, last], say=said.append)
            said.append(str(caught.value))
        (message,) = said
        assert message.startswith(f"command line '{last}': {path}: ")
        assert "\n" not in message
        assert "has no effect: it is read only if" in message
        for way in CONDITIONS[path].ways:
            for clause in way:
                assert f"{clause.path} is " in message


def test_a_key_that_nothing_reads_may_say_its_default(loaded):
    """A recorded configuration holds every key, and `--print-config` must be accepted again."""
    for path in CONDITIONAL:
        *others, _ = unread_words(path)
        default = LEAVES[path].default
        config = loaded("", *others, f"{path}={show(default)}")
        assert config == loaded("", *others)


def test_what_nothing_reads_is_reported_with_all_other_problems(refused):
    """One problem a start would take five starts."""
    words = ("optimizer.momentum=0.9", "schedule.name=constant", "schedule.decay_steps=9", "model.window=4", "steps=-1")
    message = refused("remat: {tags: [keys=save]}\n", *words)
    assert message.startswith("5 problems")
    for key in ("optimizer.momentum", "schedule.decay_steps", "model.window", "remat.tags", "steps"):
        assert message.count(f": {key}: ") == 1


def test_a_name_from_outside_may_read_anything(write):
    """An optimizer of one's own may well have a momentum, a source of one's own a path."""
    words = {"optimizer.name": "mine", "data.source": "mine", "schedule.name": "mine", "engine.name": "mine"}
    keys = ("optimizer.momentum=0.9", "data.path=x", "data.cache_dir=y", "schedule.decay_steps=3", "optimizer.eps=1e-3")
    given = (*(f"{path}={name}" for path, name in words.items()), *keys, "engine.max_inflight=5")
    config = load(write(""), given, extra={path: (name,) for path, name in words.items()})
    assert (config.optimizer.momentum, config.data.path, config.engine.max_inflight) == (0.9, ("x",), 5)


def test_a_key_of_the_file_that_the_command_line_makes_idle_is_left_out_and_said(write):
    """A file with a decay must run with another curve on top; and what such a run records must load again."""
    path, words = write("schedule: {name: wsd, decay_steps: 9}\n"), ["schedule.name=constant"]
    said = []
    config = load(path, words, say=said.append)
    assert len(said) == 1
    assert "run.yml:1: schedule.decay_steps: 9 has no effect" in said[0]
    assert config.schedule.decay_steps is None
    assert load(write(to_yaml(config), "again.yml"), ["run_name=run"]) == config
    with pytest.raises(ConfigError, match="has no effect"):
        load(path, words)


def test_the_quickstart_runs_with_another_source():
    """`--help` shows this command; the batches of held-out sets that are not there are said, not refused."""
    said = []
    load(QUICKSTART, ["data.source=text", "data.path=x"], say=said.append)
    assert len(said) == 1
    assert "quickstart.yml:15: eval.max_batches: 64 has no effect" in said[0]


def test_a_key_of_the_file_that_the_file_itself_makes_idle_is_refused(write):
    """Nobody overrode anything: the file says what it does not mean."""
    said = []
    with pytest.raises(ConfigError, match=r"run.yml:2: optimizer.momentum: 0.9 has no effect"):
        load(write("optimizer:\n  momentum: 0.9\n"), ["steps=5"], say=said.append)
    assert said == []


def test_a_recorded_configuration_of_an_older_version_loads(write, loaded):
    """It holds what its version filled in as if somebody had given it: b2 0.95 for sgd, momentum 0 for adamw."""
    for name in LEAVES["optimizer.name"].declared.metadata["choices"]:
        config = loaded("", f"optimizer.name={name}")
        old = "\n".join(line.removesuffix("  # filled in") for line in to_yaml(config).splitlines())
        assert as_mapping(load(write(old, "old.yml"))) == as_mapping(config) | {"run_name": "run"}
