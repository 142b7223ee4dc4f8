"""The only place that imports verl for the losses' sake: configuration, registration, worker, metrics."""
