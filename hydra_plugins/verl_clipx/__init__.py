"""Makes the plugin's configuration groups visible to every Hydra application."""
