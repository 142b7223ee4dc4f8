"""May these runs be compared? Questions about two arms of runs, each answered from what the runs left."""
