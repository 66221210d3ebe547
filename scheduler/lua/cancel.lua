-- Cancel a job. Returns the status after the call, or '' where there is no such job.
return call_off(args.id)
