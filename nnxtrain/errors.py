"""Errors a user can cause, each with the exit code it ends the process with."""

STOPPED = 75  # exit code of a run that a signal stopped with nothing left unsaved


class UserError(Exception):
    """A message for people: what is wrong, the key and its value, what would be right."""

    exit_code = 1


class ConfigError(UserError):
    """Something that was asked for is not possible: a key, a value, a path, a command-line word."""

    exit_code = 2


class NonFiniteError(UserError):
    """Loss or gradients stopped being finite."""

    exit_code = 4


class DataError(UserError):
    """The corpus is there, but its content is not what it should be."""

    exit_code = 5


class LostProcessError(UserError):
    """Another process of the run is gone, or never came."""

    exit_code = 7


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""

    exit_code = 6
