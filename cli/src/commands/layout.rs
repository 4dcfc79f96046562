use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment};
use indicatif::{BinaryBytes, HumanCount, HumanFloatCount};
use kvpool::storage::groups::{Column, LayerGroup, LayerGroups};
use serde_json::{Value, json};

use crate::EXIT_OK;
use crate::args::LayoutArgs;
use crate::error::output_failed;
use crate::report::keeps;
use crate::{fit, output};

pub fn layout(args: &LayoutArgs) -> anyhow::Result<u8> {
    let groups = LayerGroups::described(&args.model, args.grouping.options())?;
    let text = if args.json { json(&groups, args) } else { render(&groups, args, fit::width()) };
    output::print(&text).map_err(output_failed)?;
    Ok(EXIT_OK)
}

fn json(groups: &LayerGroups, args: &LayoutArgs) -> String {
    let column = |one: &Column| json!({ "bytes": one.bytes, "planes": one.planes });
    let group = |group: &LayerGroup| {
        json!({
            "keeps": keeps(group.reach()),
            "layers": group.layers(),
            "columns": group.columns().iter().map(column).collect::<Value>(),
            "entry_bytes": group.entry_bytes(),
            "block_tokens": group.block_tokens(),
            "block_frames": group.block_frames(),
            "shares_blocks_of": group.shares_blocks_of().map(|shared| shared.0),
            "waste": group.waste(),
            "bytes_per_token": group.bytes_per_token(),
            "fixed_bytes": group.fixed_bytes(),
        })
    };
    let fits = |&tokens: &u64| {
        json!({
            "tokens": tokens,
            "bytes_held": groups.bytes_held(tokens),
            "sequences": groups.sequences_in(args.memory, tokens),
            "tokens_in_all": groups.tokens_in(args.memory, tokens),
        })
    };
    let all = json!({
        "layers": groups.layers(),
        "dtype": groups.dtype().name(),
        "frame_bytes": groups.frame_bytes(),
        "hit_tokens": groups.hit_tokens(),
        "waste": groups.waste(),
        "bytes_per_token": groups.bytes_per_token(),
        "fixed_bytes": groups.fixed_bytes(),
        "groups": groups.groups().iter().map(group).collect::<Value>(),
        "memory_bytes": args.memory,
        "fits": args.tokens.iter().map(fits).collect::<Value>(),
    });
    format!("{all:#}")
}

fn render(groups: &LayerGroups, args: &LayoutArgs, width: Option<usize>) -> String {
    let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
    let count = |number: u64| right(HumanCount(number).to_string());
    let mut table = output::table(UTF8_FULL_CONDENSED);
    table.set_header(["group", "keeps", "layers", "tokens", "frames", "entry bytes", "waste"]);
    for (id, group) in groups.groups().iter().enumerate() {
        table.add_row([
            count(id as u64),
            Cell::new(keeps(group.reach())),
            count(group.layers().len() as u64),
            group.block_tokens().map_or(right("-".to_owned()), count),
            match group.shares_blocks_of() {
                Some(shared) => right(format!("of {}", shared.0)),
                None => count(group.block_frames()),
            },
            count(group.entry_bytes()),
            right(format!("{:.2} %", 100.0 * group.waste())),
        ]);
    }
    let mut fits = output::table(UTF8_FULL_CONDENSED);
    fits.set_header(["tokens", "a sequence holds", "sequences", "tokens in all"]);
    for &tokens in &args.tokens {
        fits.add_row([
            count(tokens),
            right(BinaryBytes(groups.bytes_held(tokens)).to_string()),
            count(groups.sequences_in(args.memory, tokens)),
            count(groups.tokens_in(args.memory, tokens)),
        ]);
    }
    let heading = format!(
        "{} layers, {}, frames of {} bytes\nper sequence: {} bytes a token{}\nprefixes are hit in multiples of {} tokens",
        HumanCount(groups.layers() as u64),
        groups.dtype(),
        HumanCount(groups.frame_bytes()),
        HumanFloatCount(groups.bytes_per_token()),
        match groups.fixed_bytes() {
            0 => String::new(),
            fixed => format!(", and {} of windows and states", BinaryBytes(fixed)),
        },
        HumanCount(groups.hit_tokens()),
    );
    let parts = [
        fit::text(&heading, width),
        fit::table(table, width),
        fit::text(&format!("sequences that fit into {}", BinaryBytes(args.memory)), width),
        fit::table(fits, width),
    ];
    parts.join("\n")
}
