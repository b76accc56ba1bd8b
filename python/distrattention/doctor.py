# SPDX-License-Identifier: Apache-2.0
"""`python -m distrattention doctor`: what is installed, what was built, what this machine has and what would run."""

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import distrattention
from distrattention.settings import STRATEGIES

PACKAGES = ("torch", "transformers", "timm", "diffusers")
SAMPLE = (1, 12, 4096, 64)  # [B, H, N, d]


def report() -> tuple[list[str], bool]:
    """(lines, ok): what there is to say, and whether attention can run."""
    lines = [f"distrattention: {distrattention.__version__} in {', '.join(distrattention.__path__)}"]
    lines.append(f"python: {platform.python_version()} on {platform.platform()}, {os.cpu_count()} processors")
    lines.extend(f"{package}: {_version(package)}" for package in PACKAGES)
    try:
        lines.extend(_library_lines())
    except ImportError as error:
        return [*lines, f"operators: not available: {error}"], False
    return lines, True


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _library_lines() -> Iterator[str]:
    from distrattention import ops

    import torch  # isort: skip

    yield f"operators: loaded in torch {torch.__version__}; they serve torch from 2.10 on"
    built = ops.describe()
    yield f"version: {built.version}"
    yield f"instruction set: {built.instruction_set}"
    yield f"CUDA kernels: {built.cuda_build}"
    yield f"CUDA devices for them: {', '.join(built.cuda_devices) or 'none, as ' + built.cuda_unusable}"
    yield from (f"kernel: {operation} {name}" for operation, name in zip(built.operations, built.kernels))
    yield f"threads: {torch.get_num_threads()}, torch's own (torch.set_num_threads)"
    names = ", ".join(torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count()))
    built = f"built with CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    yield f"CUDA devices that torch sees: {names or 'none'}; it was {built}"
    yield from _sample_lines(torch.empty(1).expand(SAMPLE))
    if torch.cuda.is_available():
        yield from _sample_lines(torch.empty(1, dtype=torch.bfloat16, device="cuda").expand(SAMPLE))


def _sample_lines(sample):
    """What would run for Q, K and V like `sample`."""
    yield f"sample problem: q, k, v {list(sample.shape)} {sample.dtype} on {sample.device}, group_size 2"
    for operation in ("forward", "backward"):
        for strategy in (name for name, row in STRATEGIES.items() if row.order != "caller"):
            group_size = 1 if strategy == "exact" else 2
            settings = distrattention.Settings(strategy, group_size)
            found = distrattention.explain(sample, sample, sample, operation=operation, settings=settings)
            yield f"  {operation}, {strategy}: {found['kernel'] or 'none'} ({found['choice']})"
        for name, reason in found["kernels"].items():
            yield f"  {operation} kernel {name}: {reason or 'would serve'}"


def main() -> int:
    """Prints the report; returns 0 where attention can run, 1 where it cannot."""
    lines, ok = report()
    print("\n".join(lines))
    return 0 if ok else 1
