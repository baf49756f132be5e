"""The engine host: one process that holds one engine, and the memory and messages that it shares with the front.

front                                     host
  | exec, descriptors, settings ---------->  load, warm every lane, self-test
  | <------------- control: ready | failed |
  | lane 0: run {generation, shapes} ----->  thread 0: views on the arena, run, write into its own region
  | <------ {generation, shapes, seconds}  |
  | SIGTERM or end of file --------------->  finish what runs, exit 0
"""
