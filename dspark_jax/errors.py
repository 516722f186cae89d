"""Typed errors: each names the argument, its value and what is legal."""


class DsparkError(ValueError):
    """Base class of every error that this package raises on purpose."""


class ConfigError(DsparkError):
    """A configuration is missing a key, contradicts itself or asks for something unsupported."""


class CheckpointError(DsparkError):
    """A checkpoint has missing, unknown, mismatched, truncated or unreadable tensors."""


class PairError(DsparkError):
    """A draft does not belong to the target it is paired with."""


class RequestError(DsparkError):
    """A prompt, a sampling value or a limit of a request is not legal."""


class TextError(DsparkError):
    """A tokenizer or chat template is missing or does not accept the input."""
