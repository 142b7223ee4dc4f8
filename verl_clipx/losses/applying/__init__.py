"""From a method to a loss: the one compiled function and its metrics."""
