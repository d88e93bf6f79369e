"""Evaluation on tasks of lm_eval (lm-evaluation-harness), on any number of processes.

    config          the block `eval_harness:` of a YAML file
    tasks           lm_eval's tasks by name, loaded with their documents          (imports lm_eval)
    task_discovery  the tasks on every process; how many requests they make
    encoding        texts to tokens by lm_eval's rules: inputs and scored targets
    packing         which queries share a row, and how long rows are
    batch_shapes    row lengths that suit a known set of queries
    request_table   the rows of a list of queries as one value with a digest
    scoring         the Programs that score rows; sums of log-probabilities
    generation      requests for generated text
    lm              lm_eval's model interface: requests in, scores and texts out  (imports lm_eval)
    broadcast       process 0 sends tables to the other processes, and the end of the run
    driver          a run of lm_eval and its dictionary of results                (imports lm_eval)
    results         result files, samples, metrics for trackers
    significance    comparison of two runs on the same documents by the paired bootstrap
    page            the HTML page of a run

lm_eval passes all requests of one kind at once. Only process 0 imports it; the other processes execute the tables that
they receive until process 0 reports that the run has finished or failed. An exception in a task therefore ends all
processes, and batches need no messages of their own.
"""
