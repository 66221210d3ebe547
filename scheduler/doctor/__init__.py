"""`tandem doctor`: what this machine and its peer are like, judged over samples."""
