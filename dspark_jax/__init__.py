"""DSpark in JAX: speculative decoding that answers faster without changing what a model says.

``load_pair`` reads a target and its draft, ``generate`` and ``stream`` answer prompts; ``dspark_jax.decode`` holds the pure
functions below them.
"""

from importlib.metadata import version as _version

from dspark_jax.errors import CheckpointError, ConfigError, DsparkError, PairError, RequestError, TextError
from dspark_jax.generate import Delta, generate, stream
from dspark_jax.pair import Pair, load_pair
from dspark_jax.requests import Output, Stats
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Autoregressive, FixedLength, Threshold

__version__ = _version("dspark-jax")

__all__ = [
    "Autoregressive",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DsparkError",
    "FixedLength",
    "Output",
    "Pair",
    "PairError",
    "RequestError",
    "SamplingParams",
    "Stats",
    "TextError",
    "Threshold",
    "__version__",
    "generate",
    "load_pair",
    "stream",
]
