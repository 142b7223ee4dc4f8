"""In the place of a training: notes its number and the signal that ends it, in files; ends by itself after a minute."""

import os
import signal
import sys
import time

home = os.environ["HOME"]


def end(number, _):
    with open(home + "/ended", "a") as file:
        file.write(signal.Signals(number).name)
    sys.exit(128 + number)


for name in ("SIGHUP", "SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), end)
with open(home + "/part", "w") as file:
    file.write(str(os.getpid()))
os.rename(home + "/part", home + "/running")
time.sleep(60)
