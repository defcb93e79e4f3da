# Completion of jaxlm for fish, made by `jaxlm completion fish`.

set -g __jaxlm_table '
@WORDS@
'
set -g __jaxlm_rows (string split \n -- $__jaxlm_table | string match -v '')

function __jaxlm_complete
    set -l cur (commandline -ct)
    set -l before (commandline -opc)
    set -l verb ''
    set -l context ''
    for word in $before[2..-1]
        string match -q -- '-*' $word; and continue
        if test -z "$verb"
            set verb $word
            set context $word
        else if test "$context" = "$verb"; and string match -q -- "$verb $word|*" $__jaxlm_rows
            set context "$verb $word"
        end
    end
    set -l settings '@'
    string match -q -- "@$context|*" $__jaxlm_rows; and set settings "@$context"
    set -l flag ''
    set -l prefix ''
    set -l typed $cur
    if string match -q -- '-*=*' $cur
        set flag (string replace -r '=.*' '' -- $cur)
        set prefix "$flag="
        set typed (string replace -r '^[^=]*=' '' -- $cur)
    else if not string match -q -- '-*' $cur; and string match -qr -- '^--[^=]+$' $before[-1]
        string match -qr -- "\|$before[-1]\|[^|]" $__jaxlm_rows; and set flag $before[-1]
    end
    set -l rows (string match -- "$context|*" $__jaxlm_rows)
    if test "$context" != "$verb"
        set -a rows (string match -- "$verb|-*" $__jaxlm_rows)
    end
    if test -n "$verb"; and string match -q -- '*--config.*' "$cur$flag"
        set -a rows (string match -- "$settings|*" $__jaxlm_rows)
    end
    set -l found
    if test -n "$flag"
        for row in (string match -- "*|$flag|*" $rows)
            set -l cells (string split '|' -- $row)
            for word in (string split -n ' ' -- $cells[3])
                switch $word
                    case .
                        for file in $typed*
                            test -d $file; and set file $file/
                            echo -- $prefix$file
                        end
                    case '='
                    case '*'
                        echo -- $prefix$word
                end
            end
            return
        end
        return
    end
    for row in $rows
        set -l cells (string split '|' -- $row)
        if test -z "$cells[2]"
            string match -q -- '-*' $cur; and continue
            for file in $cur*
                test -d $file; and set file $file/
                echo -- $file
            end
            continue
        end
        string match -q -- '-*' $cells[2]; and not string match -q -- '-*' $cur; and continue
        test (string sub -l (string length -- "$cur") -- $cells[2]) = "$cur"; or continue
        set -l word $cells[2]
        set -l rest (string sub -s (math (string length -- "$cur") + 1) -- $word)
        if string match -q -- '--config.*' $cur; and string match -q -- '*.*' $rest
            set word $cur(string replace -r '\..*' '' -- $rest).
            set cells[4] settings
        else if test -n "$cells[3]"
            set word $word=
        end
        contains -- $word $found; and continue
        set -a found $word
        printf '%s\t%s\n' $word $cells[4]
    end
    if test -n "$verb"; and string match -q -- '-*' $cur; and not string match -q -- '--config.*' $cur
        string match -q -- "*|--config|*" $rows; and printf '%s\t%s\n' --config. settings
    end
end

complete -c jaxlm -e
complete -c jaxlm -f -a '(__jaxlm_complete)'
