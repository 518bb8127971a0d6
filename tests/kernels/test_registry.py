"""Which backend is taken, and what becomes of one that does not work."""

import subprocess
import sys
import types
import warnings
from collections.abc import Callable

import pytest

from oscarkv.errors import OscarError
from oscarkv.kernels import available_backends, backend_statuses, get_backend, registry
from oscarkv.kernels.interface import AttentionBackend
from oscarkv.kernels.torch_backend import TorchBackend


class Named(TorchBackend):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Fakes:
    """Stands in for the GPU backends: each usable, unusable, or failing when it is started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.entries = {"torch": registry._ENTRIES["torch"]}
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(registry, "_failed", {})

    def set(self, **states: str | Exception | None) -> None:
        """None: works; a string: the reason it cannot; an exception: what starting it raises."""

        def maker(name: str, state: str | Exception | None) -> Callable[[], AttentionBackend]:
            def make() -> AttentionBackend:
                self.started.append(name)
                if isinstance(state, Exception):
                    raise state
                return Named(name)

            return make

        def reason(state: str | Exception | None) -> Callable[[], str | None]:
            return lambda: state if isinstance(state, str) else None

        entries = {
            name: registry._Entry(reason(state), maker(name, state))
            for name, state in states.items()
        }
        self.monkeypatch.setattr(registry, "_ENTRIES", entries | self.entries)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(monkeypatch)


def test_the_three_backends_are_known_fastest_first() -> None:
    assert [status.name for status in backend_statuses()] == ["cuda", "triton", "torch"]
    assert available_backends()[-1] == "torch"
    for status in backend_statuses():
        assert status.usable == (status.reason is None)


def test_auto_takes_the_first_usable(fakes: Fakes) -> None:
    fakes.set(cuda=None, triton=None)
    assert get_backend().name == "cuda"
    fakes.set(cuda="no GPU", triton=None)
    assert get_backend().name == "triton"
    assert available_backends() == ["triton", "torch"]
    fakes.set(cuda="no GPU", triton="no GPU")
    assert get_backend().name == "torch"


def test_every_backend_is_fresh(fakes: Fakes) -> None:
    fakes.set(cuda=None)
    assert get_backend() is not get_backend()
    assert get_backend("torch") is not get_backend("torch")


def test_cpu_tensors_go_to_torch(fakes: Fakes) -> None:
    fakes.set(cuda=None, triton=None)
    assert get_backend("auto", "cpu").name == "torch"
    assert get_backend("auto", "cuda:1").name == "cuda"
    assert get_backend("triton", "cpu").name == "triton"  # asked for by name
    assert fakes.started == ["cuda", "triton"]


def test_a_failed_start_warns_once_and_falls_back(fakes: Fakes) -> None:
    log = "decode.cu(12): error: " + "x" * 9999
    fakes.set(cuda=RuntimeError(log), triton=None)
    with pytest.warns(RuntimeWarning, match=r"cuda backend .* RuntimeError: decode.cu\(12\)") as w:
        assert get_backend().name == "triton"
    assert len(w) == 1
    assert len(str(w[0].message)) < 600
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get_backend().name == "triton"  # not tried again, and not said again
    assert fakes.started == ["cuda", "triton", "triton"]
    status = backend_statuses()[0]
    assert not status.usable
    assert status.reason is not None
    assert status.reason.startswith("could not be started: RuntimeError: decode.cu(12)")


def test_named_backends_do_not_fall_back(fakes: Fakes) -> None:
    fakes.set(cuda="no GPU here", triton=ValueError("bad kernel"))
    with pytest.raises(OscarError, match="cuda backend cannot run here: no GPU here"):
        get_backend("cuda")
    with pytest.raises(OscarError, match=r"triton backend could not be started: .*bad kernel"):
        get_backend("triton")
    assert get_backend("torch").name == "torch"


def test_a_named_start_that_works_forgets_the_failure(fakes: Fakes) -> None:
    fakes.set(cuda=RuntimeError("busy"))
    with pytest.warns(RuntimeWarning, match="busy"):
        get_backend()
    fakes.set(cuda=None)
    assert get_backend().name == "torch"
    assert get_backend("cuda").name == "cuda"
    assert get_backend().name == "cuda"


def test_unknown_backend() -> None:
    with pytest.raises(OscarError, match="unknown backend 'vulkan'; known: auto, cuda, triton"):
        get_backend("vulkan")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (ModuleNotFoundError("No module named 'abacus'", name="abacus"), "abacus is not installed"),
        (ModuleNotFoundError("x", name="oscarkv.kernels.fake"), "does not have it"),
        (OSError("libcuda.so.1: cannot open"), "OSError: libcuda.so.1: cannot open"),
    ],
)
def test_packages_that_cannot_be_imported_say_what_to_do(
    raised: Exception, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise raised

    monkeypatch.setattr(registry.importlib, "import_module", fail)
    entry = registry._package("fake", "FakeBackend", 'pip install "oscarkv[fake]"')
    reason = entry.unusable_reason()
    assert reason is not None
    assert expected in reason
    if "does not have it" not in expected:
        assert 'pip install "oscarkv[fake]"' in reason


def test_packages_are_loaded_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    package, module = types.ModuleType("fake"), types.ModuleType("fake.backend")
    package.unusable_reason = lambda: "too old"  # type: ignore[attr-defined]
    module.FakeBackend = TorchBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "oscarkv.kernels.fake", package)
    monkeypatch.setitem(sys.modules, "oscarkv.kernels.fake.backend", module)
    entry = registry._package("fake", "FakeBackend", "")
    assert entry.unusable_reason() == "too old"
    assert isinstance(entry.make(), TorchBackend)


def test_importing_the_kernels_loads_no_gpu_library() -> None:
    code = (
        "import sys, torch; before = set(sys.modules); import oscarkv.kernels; "
        "print([m for m in set(sys.modules) - before if m.startswith(('triton', 'cuda', "
        "'oscarkv.kernels.cuda', 'oscarkv.kernels.triton'))])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
