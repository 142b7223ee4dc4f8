"""In the place of Ray: nodes that live are the words of a file; another file says that somebody has looked."""

import os
from pathlib import Path


def init(address, **_):
    if address != "head:6379":
        raise ConnectionError(address)


def nodes():
    names = Path(os.environ["NODES"]).read_text().split()
    Path(os.environ["NODES"] + "_seen").touch()
    return [{"NodeID": name, "NodeManagerAddress": name, "Alive": True} for name in names]
