"""A stub of the CUDA driver, loaded into this process where there is no driver, so that cuDNN builds plans here.

cuDNN finds ``libcuda.so.1`` by the name that a loaded library gives itself, so a stub that is loaded from anywhere
serves. Its source is ``stub_driver.c``. A process that has a driver never gets the stub, and one that got the stub sees
no GPU, ever.
"""

from __future__ import annotations

import base64
import ctypes
import os
import platform
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable
from typing import Literal

from fusedattn.errors import BuildError

_NAME = "libcuda.so.1"
# Only the stub has this function.
_MARK = "fusedattn_stub_driver"
_WHAT = "a stub of the CUDA driver"
_HINT = "Build plans on another machine, or install the NVIDIA driver; engine='torch' needs neither."
_LOCK = threading.Lock()


def driver_kind() -> Literal["real", "stub", "none"]:
    """Tell which driver this process has, without loading one.

    Returns:
        ``real`` for any ``libcuda.so.1`` but the stub.

    Raises:
        Nothing.

    Example:
        >>> driver_kind() in ("real", "stub", "none")
        True
    """
    try:
        library = ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD)
    except (AttributeError, OSError):
        return "none"
    return "stub" if hasattr(library, _MARK) else "real"


def ensure_driver() -> Literal["real", "stub"]:
    """Load this machine's driver or, where there is none, the stub; to be called before cuDNN is used.

    Returns:
        Which of them the process has from now on.

    Raises:
        BuildError: There is no driver, and the stub cannot be loaded.

    Example:
        >>> ensure_driver() == driver_kind()
        True
    """
    with _LOCK:
        try:
            ctypes.CDLL(_NAME)
        except OSError:
            # Not there, or one that does not load, of which nothing can come either.
            _load_stub()
        kind = driver_kind()
    if kind == "none":
        raise BuildError(_WHAT, f"it was loaded, but this C library does not find it as {_NAME}", _HINT)
    return kind


def failure_hint(message: str) -> str:
    """Say what to do about a failure of cuDNN to load a part of itself, such as it has without a driver.

    Args:
        message: cuDNN's.

    Returns:
        A sentence; empty where the failure is of another kind.

    Raises:
        Nothing.

    Example:
        >>> failure_hint("ptrDesc->finalize(), and code: CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED")
        'Was cuDNN used in this process before fusedattn ...'
    """
    if "SUBLIBRARY_LOADING_FAILED" not in message:
        return ""
    return (
        "Was cuDNN used in this process before fusedattn loaded a stub of the driver? Then it goes on failing: "
        "start a new process, and let fusedattn be the first to use cuDNN there."
    )


def _load_stub() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in _OBJECTS:
        wanted = f"there is one for Linux on {' and '.join(_OBJECTS)}"
        raise BuildError(_WHAT, f"{wanted}, and this is {sys.platform} on {machine}", _HINT)
    stub = zlib.decompress(base64.b64decode(_OBJECTS[machine]))
    faults = []
    loaders: tuple[Callable[[bytes], None], ...] = (_load_from_memory, _load_from_file)
    for load in loaders:
        try:
            load(stub)
        except OSError as error:
            faults.append(str(error))
        else:
            return
    raise BuildError(_WHAT, "; ".join(faults), "Set TMPDIR to a folder that may be written to and executed from.")


def _load_from_memory(stub: bytes) -> None:
    if not hasattr(os, "memfd_create"):
        raise OSError("this Python has no memfd_create")
    # Never closed: the loader knows the library by this path, which another file of the same number would take over.
    number = os.memfd_create("fusedattn_stub_driver")
    try:
        with open(number, "wb", closefd=False) as file:
            file.write(stub)
        ctypes.CDLL(f"/proc/self/fd/{number}")
    except OSError:
        os.close(number)
        raise


def _load_from_file(stub: bytes) -> None:
    with tempfile.NamedTemporaryFile(prefix="fusedattn_stub_driver_", suffix=".so") as file:
        file.write(stub)
        file.flush()
        ctypes.CDLL(file.name)


# stub_driver.c, compiled as it says there.
_OBJECTS = {
    "x86_64": """
eNq9Vl1oVEcUnuyu+bMNKjZWiCVtKRrUa3apImJD4u4m/mw0JWqrL9vZe8fsxb0zy9y5uhukfyhtbbGGCoVWSgsFJX3wRYu+SKiCLdQHFRSbFwmt0McWY2wf
Np3Jndm9e83YlkIPzJ57vjPnzPmZvfe8lc70RxoagKIo6AE1CYBeySeag9hGEOO/LaB5bu8CoKeTTfUcLPKZsGsM6pfV8wlQz5Vd5F/aqbBf/YVZjeCfkzwO
LJaxxpSvp+7d7/3kjd4v3wV9IBZrOTn2HdjCi7Toq71tseazW4K1i8pYhV0LX23Sn6ClfLXzJcJezlcHXyuk7vun/1y3cN9dZ+f44PiPM6enJw+m92w9NnZ+
7M7mmWzizOH2VUd+rvz0zvhzX1z+oLL80otn3p+kJ3Z1nGqtHL2+siv96+ulqeTtj0c2rf02dXrp9r7fpk/Bu59eOz8z+l4iew7eavx9avSFq5XKiWOZrzv/
mLz+kXG70nrzRs+ajv2tR9a/Nr3vSXXZwRNcwqtxXNZf1fSeBr+kwd/U4E0a/NnI/PhRMD/+vMaPo8E/1+BnNf7XaOJ5pPFzXIN/o8GnNOd+qMF/0PhZJve/
LfFWiX+m8XNTg2c1eIPER0P4Vc3+Lk08Rc3+Cxr8kQbfr6nDBt190/Rxs8Y/OOC5yIKM4azLvFzWovYhRIHpZewchbScIdBKQQZryABiOxDFqMChXabpFSE2
y4OwNEQYwsyGhWTBcxmiw/YoElbQw2bet0iXOOA/ci/9XMFsgjm2DduMs2FGEXS4KslKcwfigynkMkrKUkpyPUNKIE6xgKpinxUKdA8u8ODrU+mnxOm3C+HA
qmKSkCKikPEiVDX+wzBifYxRO+fNnVjNIghyMU0poTuhI8TUXC05uBdR1080hQ7ZJhIZEg+zIMCfedZDnptPepQirABSrJP5zozt2DWppt2NsEvoICymsUks
tJunaT0Ob3MSJhFpDRLLK6BqkXwx0G4fqO+TSpA3ysYjoGDnTM+ChkuMOLgo/jpXtl5rEt+a+MSVi5aQ2+Q1eyXi8+nKLBG8U35Y1Le2e8Hj78fg/2m7lBcq
Pfh/aCCZ3NS5KoVyNsSd8YSRMLrXxl9ebaFcPOHFuyQEgOHm+UVlMAeMEewZeejmgWGVsVt2fM4oMBgqMWCgfPYAFTdE4NCxTWCYxHFEE/87ifo8nJ0lslzV
Oiv+ANTmjuA8oegZ6SMS6kOVR2uzQEPAXvVjhdRFQn1VXPURBN63QXopMEsJUu9hxdvBk+1XSyyim9dCFM5/vTw7CkLzWFP9HBYN2av5qkee3x3yOyQ3rtTE
H+TReeI8LO0H/ib/vwB6XZVi
""",
    "aarch64": """
eNq9Vl9oHEUYn/tj7nKtpUptLaR6KmKD7ZocVbRUSXJ3qW0ubTVttX25zu2OuaW7O8fsbL0LQWNJ8S/VYEDQoBGElvjgS1X6IkUKKtgHI0RqXkJQwTcVY1of
Ls7eztztrjfVB/GD2W++3/dn5vu+YWeezxcGo5EIEBQDn4KWBEAf578k/djDIM6+KdDZsL0JyGkmEeSAR3e/HWzMcnw2EQnwJW69BIJ+0X/wu8StBRfbfuJH
qnWAf08bOb+FrxwXsdYv/dT35om+2dOgH8TjnW9MfQ4GWJE2vn90Qzx5fsBfuxjfq+vXycYGHs+lTWxsZmMLG1vZ6GJjG9d9efOfD6w7dtU8MDc89/XqzMri
yfyRx89MXZj6bs9qMXPu2c3bx3+of//C3B3vfvZyfevFe869tEjOHuyaTtUnr9zXnf/56epyduH10d07P8nNbNrf/+vKNLz61hcXVsdezBQ/gt92/LY8dvfl
ev3smcIH6euLV15TFuqp+W8e29F1PDX+4FMrx25UlyGW4K2sGtOJYH2XJPhFCf6cBE9I8Nuj7fFJ0B6/SxLHlODvSPDzkvg7JPu5JonzigT/UIIvS9Z9VYJ/
JYmzhdtPJoLn+m1JnHkJXpTgEY6Ph/DLEvtuyX4qEvuPJfg1CX5cUoeHZOdN0sc9kvjgGcdGGqTUKtrUKRU1op9CBKhOQS8RSGoFDLUcpLCF7EV0CBELGQw6
qKpOBVpqbRhWD2GKLKpDI2s4NkVkRB9Drhd0LLXseeSrDPCmLMogU1AdWwzbZ+mUsRFKEDSZKkurjQWtkzlkU4JrXMoyPUVCwGbFQE2xXwtt9IhlsM0HUxkk
2BzUjfDGmmIW4woikLIiNDXeZATRfkqJXnIaKzaz8INMzBOCyQFoumKuUUsGHkXE9hLNoVO6itwMsWNRP8DmLOtDjl3OOoQgSwC4EpCZZUE39ZbU0h5Glo3J
MKzkLRVr6DBLU/s7vM/MqNhNaxhrjoGaRfJEX7s9INgnkSBrlG6NAkMvqY4GFRsrvewopcHEk5dixYUIOD3Pjud1wOWJ9R4H/M5w6dGox1fqa9jlaX7RiLu3
h086fP9Ll1Jc3s/ldUIP/h8S97KM9mazu9Pbc6ikQyvdm1EySs/O3l3dfAqAYpfZgaawBJRRy1HK0C4DRatZds30OCVAoahKGxI0dZUZYtr4KBWDTVRsmm7D
/xty6/fH2hrm5Wz2QfDfOR4NvT8E3cZjREN9avJY6+0Q8d9/nG/jumio74KLPgdfTS261/f2ckn8twVPh+zjIfl+7hsD4fdX8N0VC+Uv/vO7+PpCfyIZ4bx9
vZIh/kjIv8z9y8n25zrsP8D9e0J2E9zgTtC+fn4ea3Mu3uP+Q+DG9f8L5yqdyA==
""",
}
