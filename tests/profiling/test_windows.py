"""Which steps are traced; the cases are numbered as in the specification."""

import itertools

import pytest

from nnxtrain.cli.command import guarded
from nnxtrain.config.profile import ProfileConfig
from nnxtrain.errors import ConfigError
from nnxtrain.profiling.windows import Phase, ProfileSchedule, make_profile_schedule, say_windows
from nnxtrain.train import main
from tests.support import TINY

CASES = {
    "1": ((2, 3, 1, 2, 2), 30, [(6, 7, False), (12, 13, False)]),
    "2: the compiling step is in play": ((0, 0, 0, 1, 1), 3, [(0, 0, False)]),
    "3: without a gap": ((0, 0, 0, 2, 0), 6, [(0, 1, False), (2, 3, False), (4, 5, False)]),
    "4: the last is partial": ((1, 0, 0, 2, 0), 6, [(1, 2, False), (3, 4, False), (5, 5, True)]),
    "5": ((1, 0, 1, 2, 1), 8, [(2, 3, False)]),
    "6: none fits": ((10, 0, 0, 3, 1), 8, []),
    "8: the end comes while it warms up": ((0, 0, 2, 3, 1), 2, []),
    "8: the end comes early": ((0, 0, 2, 3, 1), 4, [(2, 3, True)]),
    "no wait at first": ((1, 100, 1, 1, 2, False), 1000, [(2, 2, False), (104, 104, False)]),
    "a wait at first": ((1, 100, 1, 1, 2), 1000, [(102, 102, False), (204, 204, False)]),
    "B44": ((2, 1, 1, 2, 2), 14, [(4, 5, False), (8, 9, False)]),
    "B44: no limit": ((2, 1, 1, 2, 0), 14, [(4, 5, False), (8, 9, False), (12, 13, False)]),
}


@pytest.mark.parametrize(("numbers", "total", "want"), CASES.values(), ids=CASES)
def test_windows(numbers, total, want):
    """Off by one, endless, or one cycle short: what people met elsewhere (B44)."""
    assert list(ProfileSchedule(*numbers).windows(total)) == want


def test_phases_are_those_of_torch():
    """Every small schedule, against the definition written out a second time, and against its own windows."""
    for numbers in itertools.product((0, 2), (0, 1, 3), (0, 1, 2), (1, 2), (0, 1, 2)):
        schedule = ProfileSchedule(*numbers)
        phases = [schedule.phase(i) for i in range(40)]
        skip_first, wait, warmup, active, repeat = numbers
        cycle = ["idle"] * wait + ["warmup"] * warmup + ["record"] * (active - 1) + ["record_last"]
        want = ["idle"] * skip_first + cycle * (repeat or 40) + ["idle"] * 40
        assert phases == want[:40], numbers
        kept = [i for i, phase in enumerate(phases) if phase in (Phase.RECORD, Phase.RECORD_LAST)]
        assert kept == [i for first, last, _ in schedule.windows(40) for i in range(first, last + 1)], numbers


def test_cycles_are_counted():
    """Two windows without a gap are two traces, which only the cycle tells apart."""
    schedule = ProfileSchedule(1, 0, 0, 2, 2)
    assert [schedule.cycle(i) for i in range(6)] == [None, 0, 0, 1, 1, None]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [("active", 0, ValueError), ("wait", -1, ValueError), ("warmup", True, TypeError), ("repeat", 1.5, TypeError)],
)
def test_impossible_numbers_are_refused_by_the_name_of_their_key(field, value, error):
    """Case 11, as code meets it."""
    with pytest.raises(error, match=f"profile.{field}"):
        ProfileSchedule(**{field: value})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("profile.active=0", "profile.active: 0 must be at least 1"),
        ("profile.wait=-1", "profile.wait: -1 must be at least 0"),
        ("profile.warmup=true", "profile.warmup: expected a whole number"),
        ("profile.repeat=1.5", "profile.repeat: expected a whole number"),
        ("profile.actve=3", "did you mean profile.active?"),
        ("profile.host_tracer_level=0", "profile.host_tracer_level: 0 must be at least 1"),
        ("profile.processes=some", "profile.processes: 'some' is not all"),
        ("profile.enabled=true profile.processes=5", "profile.processes: 5 matches none of the 1 processes"),
        ("profile.advanced=level", "profile.advanced: 'level' must have the form name=value"),
        ("profile.enabled=true profile.skip_first=20", "profile.skip_first: with profile.wait=0 and profile.warmup=1"),
    ],
)
def test_the_command_line_refuses_them_too(words, message, capsys):
    """Cases 6 and 11, as people meet them: exit code 2, the key, and nothing else happens."""
    assert guarded(main, [str(TINY), *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_configuration_knows_the_first_window():
    """The check before jax is imported has its own arithmetic; it must agree with the schedule's."""
    for skip_first, wait, warmup, first_wait in itertools.product((0, 3), (0, 2), (0, 1), (True, False)):
        numbers = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "first_wait": first_wait}
        config = ProfileConfig(enabled=True, **numbers)
        assert next(make_profile_schedule(config).windows(99)).first == config.first_traced
    assert make_profile_schedule(ProfileConfig()) is None


@pytest.mark.parametrize(
    ("words", "windows"),
    [
        ((), "none (profile.enabled=false)"),
        (("profile.enabled=true",), "steps 2 to 4"),
        (("profile.enabled=true", "profile.skip_first=17"), "steps 18 to 19 (partial)"),
        (("profile.enabled=true", "profile.repeat=0"), "steps 2 to 4, 6 to 8, 10 to 12, and so on"),
    ],
)
def test_a_dry_run_shows_the_windows(words, windows, capsys):
    """People see before a long run what it is going to trace."""
    assert guarded(main, [str(TINY), "--dry-run", "mesh.data=1", *words]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("profile windows"))
    assert line.removeprefix("profile windows").strip() == windows


def test_a_fresh_run_without_a_window_is_refused_and_a_resumed_one_is_not():
    """Case 6: the data may end before the steps that were asked for, and a run may have few steps left."""
    config = ProfileConfig(enabled=True, skip_first=10, warmup=0)
    with pytest.raises(ConfigError, match=r"profile.skip_first=10.*its first step would be 10, and the run has 8"):
        say_windows(config, start=0, total=8)
    assert say_windows(config, start=1000, total=1008).startswith("no window: its first step would be 1010")
    assert say_windows(config, start=1000, total=1000) is None
    assert say_windows(config, start=1000, total=2000) == "steps 1010 to 1012"


def test_which_processes_are_traced():
    """Numbers name processes; `first` is process 0."""
    traced = {word: [ProfileConfig(processes=word).is_traced(n) for n in range(3)] for word in ("all", "first", "0, 2")}
    assert traced == {"all": [True] * 3, "first": [True, False, False], "0, 2": [True, False, True]}
