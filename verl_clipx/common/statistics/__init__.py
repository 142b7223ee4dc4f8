"""Statistics for comparing methods: what differences over seeds and questions say. Knows arrays alone, no files."""
