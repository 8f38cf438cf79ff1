"""podman and buildah where no Docker engine runs, on a base image made of Debian packages.

Everything lies in one directory and runs in namespaces of its own, network and processes included:
when that is left nothing is left. Needs root, apt-get, and a network to install from.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = (
    *("podman", "buildah", "runc", "netavark", "aardvark-dns", "iptables", "iproute2"),
    *("catatonit", "mmdebstrap"),
)
#: The release that the base image's packages are of: the one that has Python 3.11.
SUITE = "bookworm"
BASE_IMAGE = "localhost/python:3.11-slim"
PROMETHEUS_IMAGE = "localhost/prometheus-of-debian"
HAPROXY_IMAGE = "localhost/haproxy-of-debian"

_STORAGE = """
[storage]
driver = "overlay"
graphroot = "{work}/images"
runroot = "{work}/state"
"""
_CONTAINERS = """
[containers]
init_path = "/usr/bin/catatonit"
seccomp_profile = "unconfined"
default_ulimits = ["nofile=20000:20000", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
lock_type = "file"
tmp_dir = "{work}/libpod"
image_copy_tmp_dir = "{work}"
volume_path = "{work}/volumes"
[network]
network_config_dir = "{work}/networks"
"""
_BASE = """
FROM scratch
ADD base.tar /
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -s /usr/bin/python3 /usr/local/bin/python
CMD ["python3"]
"""
# Laid out as prom/prometheus is.
_PROMETHEUS = f"""
FROM {BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends prometheus \\
 && install -d -o nobody -g nogroup /prometheus
VOLUME /prometheus
USER nobody
ENTRYPOINT ["/usr/bin/prometheus"]
"""
_HAPROXY = f"""
FROM {BASE_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends haproxy
USER haproxy
"""


class Unable(Exception):
    """Containers cannot be run here; says why."""


def impossible() -> str:
    """Why this machine cannot run containers at all; "" if it may."""
    if os.geteuid() != 0:
        return "podman cannot stand in for Docker without root"
    try:
        call("unshare", "--mount", "--net", "mount", "-t", "tmpfs", "none", "/mnt")
    except (OSError, Unable) as error:
        return f"no namespaces: {error}"
    return ""


def prepare(work: Path) -> dict[str, str]:
    """Install what is missing, and make the base images.

    Args:
        work: a directory for images, volumes and configuration.

    Returns:
        The environment in which podman and podman-compose use that directory.

    Raises:
        Unable: if this machine cannot do it.
    """
    if os.geteuid() != 0:
        raise Unable("no Docker engine answers, and without root podman cannot stand in for it")
    missing = [name for name in PACKAGES if not _installed(name)]
    if missing:
        if shutil.which("apt-get") is None:
            raise Unable(f"no Docker engine answers, and {', '.join(missing)} cannot be installed")
        # No daemon is started by its installation.
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        call("apt-get", "update", "-qq", env=environ)
        call("apt-get", "install", "-y", "--no-install-recommends", *missing, env=environ)
    call(sys.executable, "-m", "venv", str(work / "venv"))
    pins = str(Path(__file__).parents[2] / "constraints/dev.txt")
    call(str(work / "venv/bin/pip"), "install", "--quiet", "-c", pins, "podman-compose")

    environ = {
        **os.environ,
        "PATH": f"{work}/venv/bin:{os.environ['PATH']}",
        "CONTAINERS_STORAGE_CONF": _write(work / "storage.conf", _STORAGE.format(work=work)),
        "CONTAINERS_CONF": _write(work / "containers.conf", _CONTAINERS.format(work=work)),
        "TMPDIR": str(work),
        "BUILDAH_ISOLATION": "chroot",
        "BUILDAH_FORMAT": "docker",  # the other one has no HEALTHCHECK
        "PROMETHEUS_IMAGE": PROMETHEUS_IMAGE,
        "HAPROXY_IMAGE": HAPROXY_IMAGE,
    }
    packages = "python3,python3-venv,python3-pip,ca-certificates"
    base = str(work / "base.tar")
    call("mmdebstrap", "--variant=apt", f"--include={packages}", SUITE, base, env=environ)
    images = {BASE_IMAGE: _BASE, PROMETHEUS_IMAGE: _PROMETHEUS, HAPROXY_IMAGE: _HAPROXY}
    for image, text in images.items():
        file = _write(work / "Containerfile", text)
        call(
            *("buildah", "bud", "--network", "host", "--pull-never", "--quiet"),
            *("-t", image, "-f", file, str(work)),
            env=environ,
        )
    (work / "base.tar").unlink()
    return environ


def build_arguments(work: Path) -> str:
    """Return arguments that give `podman build` the package sources of this machine's pip.

    Directories and files that pip's configuration names (wheels, constraints, certificates) are
    mounted at the paths at which they lie here.
    """
    listing = call(sys.executable, "-m", "pip", "config", "list")
    settings: dict[str, str] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = value.strip("'\"")
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    _write(work / "pip.conf", f"[global]\n{lines}")
    mounts = {Path("/etc/pip.conf"): work / "pip.conf", Path("/etc/ssl/certs"): "/etc/ssl/certs"}
    for word in " ".join(settings.values()).split():
        # The pages of an index may point to files beside it.
        path = Path(word.removeprefix("file://"))
        path = path.parent if word.startswith("file:") else path
        covered = any(path.is_relative_to(mount) for mount in mounts)
        if path.is_absolute() and path.exists() and path != Path("/") and not covered:
            mounts[path] = path
    volumes = " ".join(f"--volume={source}:{path}:ro" for path, source in sorted(mounts.items()))
    return f"--network=host --pull=never --build-arg=PYTHON_IMAGE={BASE_IMAGE} {volumes}"


def inside(command: list[str], environ: dict[str, str]) -> int:
    """Run a command in namespaces of its own; what it leaves running ends with it."""
    # What it writes to /run goes with it, too.
    script = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'
    return subprocess.run(
        [
            *("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            *("sh", "-c", script, "sh", *command),
        ],
        env=environ,
        check=False,
    ).returncode


def clear(work: Path) -> list[str]:
    """Remove the directory; say what could not be left as it was."""
    for process in _processes(work):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while _processes(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    for mount in reversed(_mounts(work)):
        subprocess.run(["umount", mount], capture_output=True, check=False)
    shutil.rmtree(work, ignore_errors=True)
    for group in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
        for path in (*sorted(group.rglob("*/"), reverse=True), group):
            with contextlib.suppress(OSError):  # somebody's containers are in it
                path.rmdir()
    left = [f"directory {work}"] if work.exists() else []
    left += [f"mount {mount}" for mount in _mounts(work)]
    return left + [f"process {process}" for process in _processes(work)]


def call(*command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        Unable: if it fails; with the end of its output.
    """
    done = subprocess.run(
        command, env=env, cwd=cwd, text=True, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise Unable(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-4000:]}")
    return done.stdout


def _mounts(work: Path) -> list[str]:
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text("utf-8").splitlines()]
    return [mount for mount in mounts if Path(mount).is_relative_to(work)]


def _processes(work: Path) -> list[int]:
    """Those that name the directory: builds and containers of an interrupted run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(work).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [process for process in found if process != os.getpid()]


def _installed(package: str) -> bool:
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout == "installed"


def _write(path: Path, text: str) -> str:
    path.write_text(text, "utf-8")
    return str(path)
