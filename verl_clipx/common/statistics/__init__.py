"""Statistics for comparing methods: what differences over seeds and questions say. It knows only arrays, no files."""
