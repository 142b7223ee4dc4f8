"""What acts in the process of verl's trainer in a run with a clipx node: log, record, health, missing receipt."""
