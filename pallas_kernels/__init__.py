"""Pallas kernels of one decoding round: verification, the sequential draft stage, attention. Imports jax only.

One folder per op: ``__init__`` holds the public function and its validation, ``reference`` the same in plain XLA,
``pallas_tpu`` and ``pallas_gpu`` the kernels. See docs/kernels.md.
"""
