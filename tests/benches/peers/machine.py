"""Describes the machine that a benchmark runs on, and tells whether it is idle."""

import os
import pathlib
import platform
import subprocess
import time

# CPU flags that decide which kernels an engine can use.
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
# A machine whose cores are busier than this, in parts of one, is not idle.
IDLE_BUSY_MAX = 0.05


def describe():
    """What the numbers depend on, as ordered text."""
    cpu = dict(line.split(":", 1) for line in text_of(["lscpu"]).splitlines() if ":" in line)
    cpu = {name.strip(): value.strip() for name, value in cpu.items()}
    flags = cpu.get("Flags", "").split()
    return {
        "cpu": f"{cpu.get('Model name', platform.machine())}, family {cpu.get('CPU family')} model {cpu.get('Model')}",
        "cores": f"{cpu.get('CPU(s)', os.cpu_count())} ({cpu.get('Thread(s) per core', '?')} thread a core)",
        "hypervisor": cpu.get("Hypervisor vendor", "none"),
        "instruction sets": " ".join(flag for flag in FLAGS if flag in flags),
        "caches": ", ".join(f"{name.split()[0]} {cpu[name].split(' (')[0]}" for name in cpu if name.endswith(" cache")),
        "memory": f"{memory_gib():.0f} GiB",
        "transparent huge pages": selected("/sys/kernel/mm/transparent_hugepage/enabled"),
        "kernel": f"{platform.system()} {platform.release()}",
    }


def memory_gib():
    """All memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def selected(path):
    """The bracketed word of a sysfs file, such as `always [madvise] never`."""
    try:
        words = pathlib.Path(path).read_text().split()
    except OSError:
        return "unknown"
    return next((word.strip("[]") for word in words if word.startswith("[")), "unknown")


def text_of(command):
    """What a small program prints, or nothing when it is missing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except OSError:
        return ""


def load():
    """Average number of programs that wanted a core during the last minute."""
    return os.getloadavg()[0]


def busy(seconds=1.0):
    """Part of all cores' time that was used during the next seconds."""
    used_before, all_before = core_time()
    time.sleep(seconds)
    used_after, all_after = core_time()
    return (used_after - used_before) / max(1, all_after - all_before)


def core_time():
    """Used and whole time of all cores since the start, in ticks."""
    ticks = [int(word) for word in pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, idle, wait, irq, softirq, steal = ticks
    return user + nice + system + irq + softirq + steal, sum(ticks)


def wait_until_idle(seconds_max):
    """Waits a while for an idle machine; returns how busy it was when the wait ended."""
    deadline = time.monotonic() + seconds_max
    while True:
        now = busy()
        if now <= IDLE_BUSY_MAX or time.monotonic() > deadline:
            return now
