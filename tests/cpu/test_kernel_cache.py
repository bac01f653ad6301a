"""The cache of machine code on disk: what it accepts, what it refuses, and that it never fails a call.

Whoever can write an entry that a process loads owns the process, so most of this is about what is *not* read. The
native cache takes any bytes, so these tests need neither a GPU nor a compiler, except the last ones.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jattn import _core, config, ffi

NAME = hashlib.sha256(b"an entry").hexdigest()
OTHER_NAME = hashlib.sha256(b"another entry").hexdigest()
CUBIN = b"\x7fELF machine code \x00\x01\x02" * 100
HEADER = struct.Struct("<8sQQ32s")
# Neither is in the hot set of any build: both must come from the compiler or from disk.
KEY = "family=sm80_forward arch=sm_86 head_dim=64 head_dim_v=64 tile_q=64 stages=1"
LONG_KEY = (  # takes seconds to compile
    "family=sm90_backward arch=sm_90a element=f16 head_dim=64 head_dim_v=64 tile_q=128 tile_kv=128 num_warps=12"
    " stages=2 band=1 bulk_reduce=1 schedule=2 take_turns=1 dq_order=1 alibi=1 dropout=1"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that the cache has yet to make."""
    return tmp_path / "cache"


def write(folder: Path, name: str = NAME, cubin: bytes = CUBIN) -> Path:
    """Writes an entry, and returns its file."""
    assert _core.cache_write(str(folder), name, cubin) == ""
    return folder / f"{name}.cubin"


def read(folder: Path, name: str = NAME) -> bytes | None:
    return _core.cache_read(str(folder), name)


def entry(cubin: bytes, name: str = NAME) -> bytes:
    """The bytes of a sound entry, made without the module under test."""
    payload = name.encode() + cubin
    header = HEADER.pack(b"JATTNC01", len(name), len(cubin), hashlib.sha256(payload).digest())
    return header + payload


def plant(folder: Path, content: bytes = b"", mode: int = 0o600) -> Path:
    """Puts a file where an entry would be, past the cache."""
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{NAME}.cubin"
    file.write_bytes(content or entry(CUBIN))
    file.chmod(mode)
    return file


# What it writes


def test_round_trip(folder: Path) -> None:
    write(folder)
    write(folder, OTHER_NAME, b"")
    assert read(folder) == CUBIN
    assert read(folder, OTHER_NAME) == b""
    assert read(folder, hashlib.sha256(b"never written").hexdigest()) is None


@pytest.mark.parametrize("length", [0, 1, 55, 56, 63, 64, 65, 119, 120, 1000])
def test_format_and_digest(folder: Path, length: int) -> None:
    """The file is the documented format, whatever the length leaves in SHA-256's last block."""
    cubin = bytes(range(256)) * 4
    file = write(folder, cubin=cubin[:length])
    assert file.read_bytes() == entry(cubin[:length])


def test_private_to_the_user(folder: Path) -> None:
    deep = folder / "below" / "it"
    old_mask = os.umask(0)
    try:
        file = write(deep)
    finally:
        os.umask(old_mask)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for made in (deep, deep.parent, folder):
        assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_nothing_is_left_over(folder: Path) -> None:
    file = write(folder)
    write(folder)
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize(
    "name", ["", "abc", "../" + NAME, NAME.upper(), NAME[:-1] + "/", NAME + "0"]
)
def test_names_are_digests(folder: Path, name: str) -> None:
    """A name can never lead out of the folder."""
    assert "SHA-256" in _core.cache_write(str(folder), name, CUBIN)
    assert read(folder, name) is None
    assert not folder.exists()


# Entries it refuses


def test_planted_sound_entry_is_read(folder: Path) -> None:
    """The control of the refusals below: what they change is what makes them refused."""
    plant(folder)
    assert read(folder) == CUBIN


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_entry_that_others_can_write(folder: Path, mode: int) -> None:
    file = plant(folder, mode=mode)
    assert read(folder) is None
    write(folder)
    assert read(folder) == CUBIN
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_entry_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_bytes(entry(CUBIN))
    folder.mkdir(mode=0o700)
    (folder / f"{NAME}.cubin").symlink_to(target)
    assert read(folder) is None
    file = write(folder, cubin=b"new")
    assert read(folder) == b"new"
    assert not file.is_symlink()
    assert target.read_bytes() == entry(CUBIN), "the write went through the link"


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a file that belongs to somebody else"
)
def test_entry_of_another_user(folder: Path) -> None:
    file = plant(folder)
    os.chown(file, 65534, 65534)
    assert read(folder) is None
    write(folder)
    assert read(folder) == CUBIN


def test_entry_that_is_no_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    file = folder / f"{NAME}.cubin"
    os.mkfifo(file, 0o600)
    assert read(folder) is None, "or it waited for a writer for ever"
    file.unlink()
    file.mkdir()
    assert read(folder) is None
    assert _core.cache_write(str(folder), NAME, CUBIN) != ""
    assert [path.name for path in folder.iterdir()] == [file.name], "the temporary file stayed"


def damaged() -> Iterator[tuple[str, bytes]]:
    sound = entry(CUBIN)
    yield "empty", b"\n"
    yield "header only", sound[: HEADER.size]
    yield "half a header", sound[: HEADER.size // 2]
    yield "cut", sound[:-1]
    yield "longer", sound + b"\0"
    yield "magic", b"X" + sound[1:]
    yield "length", sound[:16] + struct.pack("<Q", len(CUBIN) - 1) + sound[24:]
    yield "huge length", sound[:16] + struct.pack("<Q", 2**63) + sound[24:]
    yield "digest", sound[:24] + bytes([sound[24] ^ 1]) + sound[25:]
    yield "first byte of the code", sound.replace(b"\x7fELF", b"\x7eELF", 1)
    yield "last byte", sound[:-1] + bytes([sound[-1] ^ 1])
    yield "another entry's content", entry(CUBIN, OTHER_NAME)


@pytest.mark.parametrize("content", [pytest.param(c, id=i) for i, c in damaged()])
def test_damaged_entry(folder: Path, content: bytes) -> None:
    plant(folder, content)
    assert read(folder) is None
    write(folder)
    assert read(folder) == CUBIN


# Folders it refuses


def problem_of(folder: Path | str) -> str:
    """Why the folder is not used: the write says it, and ``info`` says the same. Nothing is read either."""
    with configured(cache_dir=str(folder)):
        problem = _core.cache_info()["problem"]
    assert _core.cache_write(str(folder), NAME, CUBIN) == problem
    assert _core.cache_read(str(folder), NAME) is None
    return problem


@contextlib.contextmanager
def configured(
    *, cache_dir: str = "", cache_enabled: bool = True, offline: bool = False
) -> Iterator[None]:
    """Settings of the module inside the block, and those of the environment after it."""
    machine = config.environment()
    nvrtc_path = machine.nvrtc_path or ffi._bundled_nvrtc()
    _core.configure(
        cache_dir=cache_dir, cache_enabled=cache_enabled, nvrtc_path=nvrtc_path, offline=offline
    )
    try:
        yield
    finally:
        _core.configure(
            cache_dir=str(machine.kernel_cache_dir),
            cache_enabled=machine.kernel_cache_enabled,
            nvrtc_path=nvrtc_path,
        )


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777])
def test_folder_that_others_can_write(folder: Path, mode: int) -> None:
    plant(folder)
    folder.chmod(mode)
    assert "can be written by group or others" in problem_of(folder)


@pytest.mark.parametrize("slash", ["", "/", "//"])
def test_folder_that_is_a_link(folder: Path, tmp_path: Path, slash: str) -> None:
    plant(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    assert "must be a real directory" in problem_of(f"{folder}{slash}")


def test_folder_that_is_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    assert "must be a real directory" in problem_of(folder)


def test_folder_that_is_a_socket(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, tempfile.TemporaryDirectory() as short:
        server.bind(f"{short}/s")
        assert "must be a real directory" in problem_of(f"{short}/s")


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can make a folder that belongs to somebody else"
)
def test_folder_of_another_user(folder: Path) -> None:
    plant(folder)
    os.chown(folder, 65534, 65534)
    assert "belongs to user 65534, not to you" in problem_of(folder)


def test_folder_below_a_file(folder: Path) -> None:
    folder.write_text("in the way")
    assert problem_of(folder / "cache") != ""


def test_folder_must_be_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative name would mean another folder, perhaps somebody else's, after every change of directory."""
    monkeypatch.chdir(folder.parent)
    assert problem_of("cache") == "is not an absolute path"
    assert not folder.exists()


def test_switched_off(folder: Path) -> None:
    assert problem_of("") == "switched off"
    with configured(cache_dir=str(folder), cache_enabled=False):
        info = _core.cache_info()
    assert (info["enabled"], info["problem"]) == (False, "switched off")


READ_ONLY = """
import os, sys, tempfile, importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_core", sys.argv[1])
_core = importlib.util.module_from_spec(importlib.util.spec_from_loader("_core", loader))
loader.exec_module(_core)
if os.geteuid() == 0:  # root may write everywhere
    os.setegid(65534)
    os.seteuid(65534)
name, cubin = "0" * 64, b"code"
home = tempfile.mkdtemp()
try:
    folder = f"{home}/cache"
    assert _core.cache_write(folder, name, cubin) == ""
    os.chmod(folder, 0o500)
    assert _core.cache_write(folder, "1" * 64, cubin) == "Permission denied"
    assert _core.cache_read(folder, name) == cubin, "a read-only cache must still serve"
    assert os.listdir(folder) == [f"{name}.cubin"]
    os.chmod(home, 0o500)
    assert _core.cache_write(f"{home}/other", name, cubin) == "No such file or directory"
    assert _core.cache_read(f"{home}/other", name) is None
    print("fine")
finally:
    os.chmod(home, 0o700)
    os.chmod(folder, 0o700)
    os.remove(f"{folder}/{name}.cubin")
    os.rmdir(folder)
    os.rmdir(home)
"""


def run_script(script: str, *arguments: str) -> "subprocess.Popen[str]":
    """Starts a script with the path of the native module as its first argument."""
    command = [sys.executable, "-c", script, str(_core.__file__), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_read_only_folder_and_home() -> None:
    child = run_script(READ_ONLY)
    output, _ = child.communicate(timeout=60)
    assert (child.returncode, output) == (0, "fine\n")


# Many processes at once

WRITER = """
import sys, importlib.machinery, importlib.util
loader = importlib.machinery.ExtensionFileLoader("_core", sys.argv[1])
_core = importlib.util.module_from_spec(importlib.util.spec_from_loader("_core", loader))
loader.exec_module(_core)
folder, name = sys.argv[2], sys.argv[3]
mine = sys.argv[4].encode() * int(sys.argv[5])
for _ in range(200):
    assert _core.cache_write(folder, name, mine) == ""
    found = _core.cache_read(folder, name)
    assert found is not None, "an entry was missing or torn"
    assert len(set(found)) == 1, "an entry mixed two writers"
"""


def test_concurrent_writers(folder: Path) -> None:
    """Writers of different contents under one name: every read sees one of them, whole."""
    writers = [
        run_script(WRITER, str(folder), NAME, letter, str(size))
        for letter, size in (("a", 1), ("b", 4_000), ("c", 70_000), ("d", 200_000))
    ]
    for writer in writers:
        output, _ = writer.communicate(timeout=120)
        assert writer.returncode == 0, output
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.cubin"]


def test_files_of_a_killed_process_of_the_same_number(folder: Path) -> None:
    """In a container a process often has the number of the one before."""
    folder.mkdir(mode=0o700)
    for i in range(1000):
        (folder / f"{NAME}.{os.getpid()}.{i}.tmp").touch(mode=0o600)
    write(folder)
    assert read(folder) == CUBIN


# Listing and clearing


def test_info_and_clear(folder: Path) -> None:
    with configured(cache_dir=str(folder)):
        assert (_core.cache_info()["num_entries"], _core.cache_clear()) == (0, 0)
        sizes = [write(folder).stat().st_size, write(folder, OTHER_NAME, b"x").stat().st_size]
        (folder / f"{NAME}.123.0.tmp").write_bytes(b"left by a process that was killed")
        (folder / "notes.txt").write_text("not ours")
        info = _core.cache_info()
        assert (info["num_entries"], info["num_bytes"]) == (2, sum(sizes))
        assert (info["folder"], info["problem"]) == (str(folder), "")
        assert _core.cache_clear() == 2
        assert [path.name for path in folder.iterdir()] == ["notes.txt"]


# The store above it


@pytest.fixture
def nvrtc() -> None:
    """Skips where CUDA's run-time compiler is not installed."""
    with configured():
        status = _core.nvrtc_status()
    if not status.startswith("NVRTC "):
        pytest.skip(status)


def origin_of(key: str) -> str:
    canonical = _core.canonical_kernel_key(key)
    [kernel] = [kernel for kernel in _core.cache_info()["kernels"] if kernel["key"] == canonical]
    return kernel["origin"]


def test_compiled_once_then_read(folder: Path, nvrtc: None) -> None:
    with configured(cache_dir=str(folder)):
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        assert origin_of(KEY) == "nvrtc"
        name = _core.cache_entry_name(KEY)
        assert [path.name for path in folder.iterdir()] == [f"{name}.cubin"]
        code = read(folder, name)
        assert code == _core.compile_kernel(KEY)[0]
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        assert origin_of(KEY) == "disk"
    with configured(cache_dir=str(folder), offline=True):
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        (folder / f"{name}.cubin").unlink()
        _core.forget_unloaded_kernels()
        with pytest.raises(RuntimeError, match="run-time compilation is switched off"):
            _core.prepare_kernel(KEY)


def test_damaged_entry_is_compiled_again(folder: Path, nvrtc: None) -> None:
    with configured(cache_dir=str(folder)):
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        file = folder / f"{_core.cache_entry_name(KEY)}.cubin"
        sound = file.read_bytes()
        file.write_bytes(sound[:-8])
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        assert origin_of(KEY) == "nvrtc"
        assert file.read_bytes() == sound


def test_unusable_folder_does_not_fail_a_call(folder: Path, nvrtc: None) -> None:
    plant(folder)
    folder.chmod(0o777)
    with configured(cache_dir=str(folder)):
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        info = _core.cache_info()
        assert origin_of(KEY) == "nvrtc"
        assert "can be written by group or others" in info["problem"]
        assert info["write_problem"] == info["problem"]


def test_switched_off_writes_nothing(folder: Path, nvrtc: None) -> None:
    with configured(cache_dir=str(folder), cache_enabled=False):
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        assert origin_of(KEY) == "nvrtc"
    assert not folder.exists()


def test_one_compilation_for_many_threads(folder: Path, nvrtc: None) -> None:
    with configured(cache_dir=str(folder)):
        _core.forget_unloaded_kernels()
        before = _core.cache_info()["num_compilations"]
        threads = [threading.Thread(target=_core.prepare_kernel, args=(KEY,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert _core.cache_info()["num_compilations"] == before + 1
        assert origin_of(KEY) == "nvrtc"


def test_nobody_waits_for_compilations_of_others(folder: Path, nvrtc: None) -> None:
    with configured(cache_dir=str(folder)), concurrent.futures.ThreadPoolExecutor(1) as pool:
        _core.forget_unloaded_kernels()
        _core.prepare_kernel(KEY)
        _core.forget_unloaded_kernels()
        before = _core.cache_info()["num_compilations"]
        compiling = pool.submit(_core.prepare_kernel, LONG_KEY)
        while _core.cache_info()["num_compilations"] == before and not compiling.done():
            time.sleep(0.001)
        assert origin_of(LONG_KEY) == "on its way"
        _core.prepare_kernel(KEY)  # from disk
        assert origin_of(KEY) == "disk"
        assert _core.nvrtc_status().startswith("NVRTC ")
        assert not compiling.done()
        compiling.result()
        assert origin_of(LONG_KEY) == "nvrtc"


def test_entry_names_differ(nvrtc: None) -> None:
    """Everything that changes the machine code changes the name; another spelling of the same key does not."""
    with configured():
        names = {
            _core.cache_entry_name(key)
            for key in (KEY, KEY.replace("sm_86", "sm_89"), KEY + " element=f16", KEY + " band=1")
        }
        assert len(names) == 4
        assert _core.cache_entry_name(" ".join(reversed(KEY.split(" ")))) == _core.cache_entry_name(
            KEY
        )


# Keys: they come with a program, perhaps somebody else's, and end in a compiler's input


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("", "family is missing, must be one of sm80_forward"),
        ("family=sm80_forward", "arch is missing"),
        ("arch=sm_80", "family is missing"),
        ("family=sm80_forwards arch=sm_80", 'family is "sm80_forwards", must be one of'),
        ("family=sm80_forward arch=sm_70", 'arch is "sm_70", must be sm_ and a number from 80'),
        ("family=sm80_forward arch=sm_90b", 'arch is "sm_90b"'),
        ("family=sm80_forward arch=sm_90 -I/etc", '"-I/etc" is not name=value'),
        ("family=sm80_forward arch=sm_90 arch=sm_90", '"arch" is given twice'),
        (
            "family=sm80_forward arch=sm_90 tile=8",
            'no member is called "tile"; there are family, arch, element',
        ),
        (
            "family=sm80_forward arch=sm_90 head_dim=12",
            'head_dim is "12", must be an integer from 8 to 512',
        ),
        ("family=sm80_forward arch=sm_90 head_dim=0128", 'head_dim is "0128"'),
        ("family=sm80_forward arch=sm_90 head_dim=+128", 'head_dim is "[+]128"'),
        ("family=sm80_forward arch=sm_90 head_dim=1024", 'head_dim is "1024"'),
        (
            "family=sm80_forward arch=sm_90 stages=-1",
            'stages is "-1", must be an integer from 1 to 8',
        ),
        ("family=sm80_forward arch=sm_90 stages=99999999999999999999", "stages is"),
        ("family=sm80_forward arch=sm_90 band=true", 'band is "true", must be 0 or 1'),
        ("family=sm80_forward arch=sm_90 band=2", 'band is "2", must be 0 or 1'),
        (
            "family=sm80_forward arch=sm_90 element=f64",
            'element is "f64", must be one of f16, bf16, f32',
        ),
        (
            'family=sm80_forward arch=sm_90 element=bf16\n#include"/etc/passwd"',
            r'element is "bf16\?#include',
        ),
        ("family=sm80_forward  arch=sm_90", '"" is not name=value'),
        ("family=sm80_forward arch=sm_90 ", "ends with a space"),
        ("family=sm80_forward arch=sm_90" + " " * 2000, "at most 1024"),
    ],
)
def test_keys_that_are_refused(key: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.kernel_unit_text(key)


def test_keys_have_one_canonical_text() -> None:
    canonical = _core.canonical_kernel_key("stages=3 arch=sm_90a family=sm80_forward band=1")
    words = dict(word.split("=") for word in canonical.split(" "))
    assert list(words)[:2] == ["family", "arch"]
    assert list(words)[2:] == list(_core.config_members())
    assert (words["family"], words["arch"]) == ("sm80_forward", "sm_90a")
    assert (words["stages"], words["band"], words["mask"]) == ("3", "1", "0")
    assert _core.canonical_kernel_key(canonical) == canonical


def test_unit_text_names_every_member() -> None:
    unit = _core.kernel_unit_text("family=sm80_forward arch=sm_90 element=f16 head_dim=64 mask=1")
    for name in _core.config_members():
        assert f".{name} = " in unit
    assert ".element = Element::kF16, " in unit
    assert ".head_dim = 64, " in unit
    assert ".mask = true, " in unit
    assert 'extern "C" __global__' in unit


@pytest.mark.parametrize(
    ("variables", "enabled", "place"),
    [
        ({}, True, "home/.cache/jattn"),
        ({"XDG_CACHE_HOME": "{}/xdg"}, True, "xdg/jattn"),
        ({"XDG_CACHE_HOME": "{}/xdg", "JATTN_CACHE_DIR": "{}/own"}, True, "own"),
        ({"JATTN_KERNEL_CACHE": "off"}, False, "home/.cache/jattn"),
        ({"JATTN_KERNEL_CACHE": "0"}, False, "home/.cache/jattn"),
        (
            {"JATTN_KERNEL_CACHE": "on", "JATTN_NVRTC": "{}/libnvrtc.so.13"},
            True,
            "home/.cache/jattn",
        ),
    ],
)
def test_what_the_environment_says(
    variables: dict[str, str], enabled: bool, place: str, tmp_path: Path
) -> None:
    """In a process of its own, as the core was told."""
    names = ("XDG_CACHE_HOME", "JATTN_CACHE_DIR", "JATTN_KERNEL_CACHE", "JATTN_NVRTC")
    environment = {name: x for name, x in os.environ.items() if name not in names}
    environment |= {"HOME": str(tmp_path / "home"), "JAX_PLATFORMS": "cpu"}
    environment |= {name: x.format(tmp_path) for name, x in variables.items()}
    program = (
        "import json; from jattn import _core, config, ffi; assert not ffi.register_targets();"
        "info = _core.cache_info();"
        "print(json.dumps([info['enabled'], info['folder'], config.environment().nvrtc_path]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    nvrtc = environment.get("JATTN_NVRTC", "")
    assert json.loads(done.stdout) == [enabled, str(tmp_path / place), nvrtc]
