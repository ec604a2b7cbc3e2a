"""Errors a user can cause, each with the exit code of the process."""

STOPPED = 75  # exit code of a run stopped by a signal with all progress saved


class UserError(Exception):
    """An error shown as its message alone: what is wrong, the key and its value, and the fix."""

    exit_code = 1


class ConfigError(UserError):
    """An invalid key, value, path or command-line argument."""

    exit_code = 2


class NonFiniteError(UserError):
    """The loss or the gradients are not finite."""

    exit_code = 4


class DataError(UserError):
    """The data exists, but its content is invalid."""

    exit_code = 5


class LostProcessError(UserError):
    """Another process of the run was lost, or never joined."""

    exit_code = 7


class CheckpointError(UserError):
    """A checkpoint could not be written or read."""

    exit_code = 6
