/* scenarios.c -- the list of all. */
#include "scenarios.h"

#include <stddef.h>

const struct ex_scenario *const ex_scenarios[] = {
    &scenario_kernel_message, &scenario_kernel_pin, &scenario_kernel_pin_two,
    &scenario_ownership, &scenario_recoverers,
    &scenario_log_lapped, &scenario_log_crash, &scenario_insert, &scenario_insert_crash,
    &scenario_pin, &scenario_pin_after, &scenario_pin_batch, &scenario_pin_own, &scenario_copy, &scenario_copy_after,
    &scenario_publish, &scenario_follow_crash, &scenario_publish_crash, &scenario_joining, &scenario_lapped, &scenario_removal, &scenario_remove_race,
    &scenario_giving, &scenario_giving_pinned, &scenario_revoking, &scenario_giver_crash, &scenario_taker_crash,
    &scenario_adopt, &scenario_adopt_read, &scenario_adopt_crash, &scenario_lost_reader, &scenario_reborn,
    &scenario_arguments, &scenario_pin_all, &scenario_lru, &scenario_fifo, &scenario_lfu, &scenario_leaf,
    &scenario_damage, &scenario_open_damaged, &scenario_plan,
    &scenario_making, &scenario_removing, &scenario_remove_used, &scenario_remove_silent, &scenario_remaking, &scenario_two_makers, &scenario_late_maker, &scenario_maker_lost,
    &scenario_returning, &scenario_cut_off, &scenario_asked,
    &scenario_class_lost, &scenario_class_lost_two, &scenario_class_moved, &scenario_class_race, &scenario_class_border, &scenario_class_unpinned, &scenario_class_reserved, &scenario_class_free,
    &scenario_by_reference, &scenario_by_copy, &scenario_put_same, &scenario_kept, &scenario_crowded,
    &scenario_watch_events, &scenario_watch_local, &scenario_watch_remote,
    &scenario_pin_refused, &scenario_pin_idle, &scenario_pin_crash, &scenario_evict_crash,
    &scenario_join_worker, &scenario_catch_up, &scenario_remove_pinned,
    &scenario_giving_beside, &scenario_giving_late, &scenario_giving_busy, &scenario_giving_withdrawn, &scenario_giving_inherited, &scenario_giving_used, &scenario_wanting,
    &scenario_reader_reborn, &scenario_view, &scenario_reader_back, &scenario_busy_reborn, &scenario_reader_fenced, &scenario_reborn_read, &scenario_adopt_return, &scenario_giver_reborn, &scenario_taker_reborn,
    &scenario_zombie, &scenario_beat, &scenario_second_claim, &scenario_two_claims, &scenario_moving,
    &scenario_twice_reborn, &scenario_adopter_lost, &scenario_adopter_reborn, &scenario_adopter_fenced, &scenario_take_only_crash, &scenario_giving_recovered, &scenario_giving_duplicate,
    &scenario_remove_reuse, &scenario_log_wrapped,
    &scenario_offer_adopted, &scenario_offer_crash, &scenario_offer_revoked,
    NULL,
};
