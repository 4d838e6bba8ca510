"""Where the peers, their models and Tessera's binary are."""

import pathlib

import process

ROOT = pathlib.Path(__file__).resolve().parents[3]
PEERS = ROOT / ".tools/peers"


class Place:
    """Paths that all sections share; each is checked when it is used."""

    # Makes glibc ask for huge pages; without it engines that use malloc read weights at half the bandwidth.
    huge_pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

    def __init__(self, peers, tessera):
        self.peers, self.tessera = peers, tessera
        if not tessera.is_file():
            raise process.Failed(f"there is no {tessera}; build it (cargo build --release -p tessera) or give --tessera")
        if not (peers / "models").is_dir():
            raise process.Failed(f"there are no peers in {peers}; run tests/benches/peers/setup.sh or give --peers-dir")
        self.logs = peers / "logs"
        self.logs.mkdir(exist_ok=True)

    @property
    def python(self):
        """The Python that has vLLM and torch."""
        return self.peers / "vllm/bin/python"

    def model(self, name):
        """A model file or folder."""
        path = self.peers / "models" / name
        if not path.exists():
            raise process.Failed(f"there is no model {name}; run tests/benches/peers/setup.sh")
        return path

    def log(self, name):
        """Where a program's standard error goes."""
        return self.logs / f"run-{name}.log"


def many(threads):
    """A number of threads in words."""
    return "1 thread" if threads == 1 else f"{threads} threads"
