"""What a run is: its settings, verl's keys, the line that announces it."""
