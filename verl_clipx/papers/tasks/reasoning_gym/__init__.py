"""Short problems of the package reasoning-gym, with its own verifiers as rewards."""
