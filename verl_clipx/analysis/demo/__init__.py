"""The quick start's two runs and their page, as `clipx demo` writes them; scripts/demo.py makes the files."""
