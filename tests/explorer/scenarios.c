/* scenarios.c -- the list of all. */
#include "scenarios.h"

#include <stddef.h>

const struct ex_scenario *const ex_scenarios[] = {
    &kernel_message, &kernel_pin, &kernel_pin_two,
    &ownership, &recoverers,
    &log_lapped, &log_crash, &insert, &insert_crash,
    &pin, &pin_after, &pin_batch, &pin_own, &copy, &copy_after,
    NULL,
};
