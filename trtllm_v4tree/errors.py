"""Typed errors. An `InputError` is the caller's to mend (exit status 2); anything else is ours (exit status 1).

Every message says what was wrong, what is allowed and what to do, in one sentence.
"""


class V4TreeError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(V4TreeError, ValueError):
    """The input of a command or call is unusable; the command line ends with exit status 2."""


class ConfigError(InputError):
    """A model config or a build option that cannot be compiled."""


class CheckpointError(InputError):
    """A checkpoint that cannot be read, or whose tensors do not fit its config."""


class EngineFormatError(InputError):
    """An engine directory that this version cannot load (format, target, hash)."""


class RequestError(InputError):
    """A generation request that the loaded engine refuses."""


class CapacityError(V4TreeError):
    """No slot or page is free now; the request can be tried again."""
