"""Which running requests `fcfs` pauses, and when they resume: all in order where restoring parts of
everyone costs more (`choice`), or in rotation while their SLO leaves time (`rotation`)."""
