"""From a method to a loss: the one compiled function, its metrics, and the contract."""
