"""On the path of every interpreter that scripts/test.sh starts; each imports verl, or much of it.

The garbage collector's usual threshold of 700 objects makes it run 3,000 times in these five seconds, and takes one.
"""

import gc

gc.set_threshold(100_000, 20, 50)
