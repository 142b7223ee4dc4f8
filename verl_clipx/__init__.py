"""verl-clipx: policy losses with adaptive and soft clipping for veRL.

Importing this package is cheap on purpose: every process that imports verl imports it.
"""

__version__ = "0.1.0"
