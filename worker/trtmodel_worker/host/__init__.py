"""The engine host: one process that holds one engine, and the memory and messages that it shares with the front.

front                                     host
  | exec, descriptors, settings ---------->  load, warm every lane, self-test, try whether rows see each other
  | <------------- control: ready | failed |
  | lane 0: run {generation, shapes} ----->  thread 0: views on the arena, run, write into its own region
  | <------ {generation, shapes, seconds}  |
  | lane 1: probe {generation} ----------->  thread 1: run the golden samples again, in private memory
  | <------ {generation} | wrong output    |
  | <------ {recoverable error}            |  thread 0: free the lane, make another, run it once
  | <------ rested                         |
  | SIGTERM or end of file --------------->  finish what runs, exit 0
"""
