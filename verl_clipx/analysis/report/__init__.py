"""Pages and figures about runs, drawn from what runs/, diagnose/ and replay/ say."""
