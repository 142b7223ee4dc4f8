"""What a run is: its settings, what becomes of verl's keys, and the line that announces it."""
