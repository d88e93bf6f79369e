"""The evaluation harness: tasks of lm_eval asked of a model on any number of processes.

    asked      texts as tokens, by lm_eval's rules: what is put in and what is scored of it
    packing    which of them share a row, and how long rows are
    table      all of that as one value, frozen: what every process computes
    program    the Programs that score its rows
    scoring    a table through them; sums of log-probabilities
    following  what process 0 tells the others: tables, and that it is done
    found      which tasks there are, on every process
    leading    all tasks asked, with a line of progress
    tasks      lm_eval's tasks, found and loaded           (imports lm_eval)
    asking     lm_eval's model: answers of ours to it      (imports lm_eval)
    evaluating a run of lm_eval, and its dictionary        (imports lm_eval)
    results    files, numbers for trackers
    samples    documents with what was asked and answered, of this run or from files
    comparing  two runs on the same documents, by the paired bootstrap
    page       a page of a run

lm_eval hands over all requests of a kind at once. Process 0 alone imports it; the others loop over tables until they
hear that it is done or that it failed, so a task that raises ends everybody, and no batch needs a message of its own.
"""
