"""DSpark in JAX: speculative decoding that answers faster without changing what a model says.

``load_pair`` reads a target and its draft, ``generate`` and ``stream`` answer prompts; ``dspark_jax.decode`` holds the pure
functions below them.
"""

from importlib.metadata import version as _version

from dspark_jax.cost import CostTable
from dspark_jax.errors import CheckpointError, ConfigError, DsparkError, PairError, RequestError, TextError
from dspark_jax.generate import Delta, generate, stream
from dspark_jax.pair import Pair, load_pair
from dspark_jax.requests import Output, Stats
from dspark_jax.sampling import SamplingParams
from dspark_jax.schedule import Adaptive, Algorithm1, Autoregressive, FixedLength, FullSearch, Lagged, Observed, Threshold

__version__ = _version("dspark-jax")

__all__ = [
    "Adaptive",
    "Algorithm1",
    "Autoregressive",
    "CheckpointError",
    "ConfigError",
    "CostTable",
    "Delta",
    "DsparkError",
    "FixedLength",
    "FullSearch",
    "Lagged",
    "Observed",
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
